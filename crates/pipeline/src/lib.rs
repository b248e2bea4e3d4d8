//! the runner: graph, freshness, processes, progress.
