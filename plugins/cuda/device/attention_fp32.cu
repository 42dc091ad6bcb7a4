// Attention to keys and values that are kept as FP32 (caches.cu, attention.cu).

ROTATE(rotate_fp32, Fp32Kept)
ATTEND_IN(fp32, Fp32Kept)
