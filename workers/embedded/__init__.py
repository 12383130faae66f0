"""The whole product on one machine, from one data directory: `sluicegate up`."""
