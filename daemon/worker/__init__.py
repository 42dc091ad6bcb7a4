"""The worker process, which becomes a rank, an expert host or a cache holder."""
