// Attention to keys and values that are kept as INT8 (caches.cu, attention.cu).

ROTATE(rotate_int8, Int8Kept)
ATTEND_IN(int8, Int8Kept)
