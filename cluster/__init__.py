"""Ray actors, the Serve graph, the command line. Imports everything."""
