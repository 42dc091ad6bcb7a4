// Attention to keys and values that are kept as FP16 (caches.cu, attention.cu).

ROTATE(rotate_fp16, Fp16Kept)
ATTEND_IN(fp16, Fp16Kept)
