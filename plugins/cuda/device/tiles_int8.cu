// Products by codes of 8 bits in tiles (tiles.cu), of as many rows and tokens as there are registers for.

TILE_PRODUCTS(products_int8, 8, false)
TILE_PRODUCTS(products_int8_zeros, 8, true)
TILE_PRODUCTS_OF(products_int8_32x32, 8, false, false, 2, 4, 2)
