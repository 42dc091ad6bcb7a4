"""How much exactness formats, caches and cuts over ranks cost."""
