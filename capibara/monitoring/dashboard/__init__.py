"""A web page of runs, live: reads run folders and serves their metrics, checkpoints and alerts over HTTP."""
