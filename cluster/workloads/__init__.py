"""What a cluster is asked for: trace files, and loads that are made up; for the simulator and for `kvrelay bench`."""
