// Products by codes of 8 bits in tiles (tiles.cu).

TILE_PRODUCTS(products_int8, 8, false)
TILE_PRODUCTS(products_int8_zeros, 8, true)
