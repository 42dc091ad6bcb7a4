// Products by codes of 4 bits in tiles (tiles.cu).

TILE_PRODUCTS_OF(products_int4_short_16x8, 4, 32, true, false, 1, 1, 5)
TILE_PRODUCTS_OF(products_int4_short_16x16, 4, 32, true, false, 1, 2, 4)
TILE_PRODUCTS_OF(products_int4_short_zeros_16x8, 4, 32, true, true, 1, 1, 5)
TILE_PRODUCTS_OF(products_int4_short_zeros_16x16, 4, 32, true, true, 1, 2, 4)
TILE_PRODUCTS(products_int4, 4, false)
TILE_PRODUCTS(products_int4_zeros, 4, true)
