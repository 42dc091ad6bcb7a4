// Products by codes of 8 bits (quantised.cu): by the bits of weights and the stretches of a block; by the bits, whether pieces
// are short and zeros given.

QUANTISE(quantise_int8_1, 8, 1)
QUANTISE(quantise_int8_2, 8, 2)
QUANTISE(quantise_int8_4, 8, 4)
PRODUCTS(products_int8, 8, false, false)
PRODUCTS(products_int8_zeros, 8, false, true)
EXPERT_PRODUCTS(expert_products_int8, 8, false, false)
EXPERT_PRODUCTS(expert_products_int8_zeros, 8, false, true)
