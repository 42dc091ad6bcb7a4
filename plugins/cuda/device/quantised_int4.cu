// Products by codes of 4 bits (quantised.cu): by the bits of weights and the stretches of a block; by the bits, whether pieces
// are short and zeros given.

QUANTISE(quantise_int4_1, 4, 1)
QUANTISE(quantise_int4_2, 4, 2)
PRODUCTS(products_int4_short, 4, true, false)
PRODUCTS(products_int4_short_zeros, 4, true, true)
PRODUCTS(products_int4, 4, false, false)
PRODUCTS(products_int4_zeros, 4, false, true)
EXPERT_PRODUCTS(expert_products_int4_short, 4, true, false)
EXPERT_PRODUCTS(expert_products_int4_short_zeros, 4, true, true)
EXPERT_PRODUCTS(expert_products_int4, 4, false, false)
EXPERT_PRODUCTS(expert_products_int4_zeros, 4, false, true)
