"""Pages for people: server-rendered, live, with the same permissions as the API."""
