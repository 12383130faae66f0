"""The service: settings, database, evidence log, HTTP interface, client library and command line."""
