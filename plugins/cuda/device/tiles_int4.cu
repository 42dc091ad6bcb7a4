// Products by codes of 4 bits in tiles (tiles.cu), of as many rows and tokens as there are registers for.

TILE_PRODUCTS_OF(products_int4_short_16x8, 4, true, false, 1, 1, 3)
TILE_PRODUCTS_OF(products_int4_short_16x16, 4, true, false, 1, 2, 2)
TILE_PRODUCTS_OF(products_int4_short_zeros_16x8, 4, true, true, 1, 1, 3)
TILE_PRODUCTS_OF(products_int4_short_zeros_16x16, 4, true, true, 1, 2, 2)
TILE_PRODUCTS(products_int4, 4, false)
TILE_PRODUCTS(products_int4_zeros, 4, true)
TILE_PRODUCTS_OF(products_int4_32x32, 4, false, false, 2, 4, 2)
TILE_PRODUCTS_OF(products_int4_zeros_32x32, 4, false, true, 2, 4, 2)
TILE_PRODUCTS_OF(products_int8_32x32, 8, false, false, 2, 4, 2)
