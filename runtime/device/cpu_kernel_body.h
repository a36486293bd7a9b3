/* The part of cpu_kernel.c that is the same for both types; included once for each, with TYPE and
 * NAME defined. No include guard. */

/* Panels of `width` lines, one element of each line after another: line i begins at
 * from[i * stride] and its `count` elements are `step` apart. Lines that are missing are 0. */
static void NAME(pack_slow)(TYPE *to, const TYPE *from, int64_t lines, int64_t stride,
                            int64_t begin, int64_t end, int64_t step, int width) {
    for (int64_t p = begin; p < end; p++) {
        for (int64_t i = 0; i < lines; i++) to[p * width + i] = from[i * stride + p * step];
        for (int64_t i = lines; i < width; i++) to[p * width + i] = 0;
    }
}

/* Lines that lie side by side: some rows of all of them at a time, so that neither what is read
 * nor what is written jumps far. */
static void NAME(pack_rows)(TYPE *to, const TYPE *from, int64_t lines, int64_t count, int64_t step,
                            int width) {
    for (int64_t p = 0; p < count; p += ROWS_AT_ONCE) {
        int64_t rows = count - p < ROWS_AT_ONCE ? count - p : ROWS_AT_ONCE;
        for (int64_t i = 0; i < lines; i += width) {
            TYPE *panel = to + i * count + p * width;
            const TYPE *row = from + p * step + i;
            for (int64_t r = 0; r < rows; r++, panel += width, row += step) {
                for (int j = 0; j < width; j += 16 / (int)sizeof(TYPE)) {
                    memcpy(panel + j, row + j, 16);
                }
            }
        }
    }
}

static void NAME(pack)(TYPE *to, const TYPE *from, int64_t lines, int64_t stride, int64_t count,
                       int64_t step, int width) {
    int64_t whole = lines / width * width;
    if (stride == 1 && width % (16 / (int)sizeof(TYPE)) == 0) {
        NAME(pack_rows)(to, from, whole, count, step, width);
        to += whole * count, from += whole, lines -= whole;
    }
    for (; lines > 0; lines -= width, to += count * width, from += width * stride) {
        if (lines < width || step != 1 || width % 4 != 0) {
            NAME(pack_slow)(to, from, lines < width ? lines : width, stride, 0, count, step, width);
            continue;
        }
        int64_t turned = count & ~(int64_t)3;
        for (int64_t p = 0; p < turned; p += 4) {
            for (int64_t i = 0; i < width; i += 4) {
                NAME(turn)(to + p * width + i, width, from + i * stride + p, stride);
            }
        }
        NAME(pack_slow)(to, from, width, stride, turned, count, step, width);
    }
}

/* All tiles of one block of C. */
static void NAME(tiles)(tile_kernel tile, int64_t m, int64_t n, int64_t k, const TYPE *a,
                        const TYPE *b, TYPE *c, int64_t ldc, bool add) {
    for (int64_t i = 0; i < m; i += tile.rows) {
        int64_t rows = m - i < tile.rows ? m - i : tile.rows;
        for (int64_t j = 0; j < n; j += tile.cols) {
            int64_t cols = n - j < tile.cols ? n - j : tile.cols;
            TYPE *to = c + i * ldc + j;
            if (rows == tile.rows && cols == tile.cols) {
                tile.run(k, a + i * k, b + j * k, to, ldc, add);
                continue;
            }
            TYPE edge[LARGEST_TILE];
            tile.run(k, a + i * k, b + j * k, edge, tile.cols, false);
            for (int64_t y = 0; y < rows; y++) {
                for (int64_t x = 0; x < cols; x++) {
                    TYPE value = edge[y * tile.cols + x];
                    to[y * ldc + x] = add ? to[y * ldc + x] + value : value;
                }
            }
        }
    }
}

static void NAME(product)(const cpu_kernel_call *call) {
    int64_t m = call->m, n = call->n, k = call->k;
    TYPE *c = call->c;
    for (int64_t i = 0; i < m && k == 0 && !call->accumulate; i++) {
        memset(c + i * call->c_row, 0, (size_t)n * sizeof(TYPE));
    }
    tile_kernel tile = tile_for(call->dtype);
    block_sizes block = block_for(tile, m, n, k);
    TYPE *packed_a = call->packing;
    TYPE *packed_b = (TYPE *)((char *)call->packing + packed_bytes(block.m, block.k, call->dtype));
    for (int64_t i = 0; i < m; i += block.m) {
        int64_t rows = m - i < block.m ? m - i : block.m;
        for (int64_t p = 0; p < k; p += block.k) {
            int64_t depth = k - p < block.k ? k - p : block.k;
            const TYPE *a = (const TYPE *)call->a + i * call->a_row + p * call->a_col;
            NAME(pack)(packed_a, a, rows, call->a_row, depth, call->a_col, tile.rows);
            for (int64_t j = 0; j < n; j += block.n) {
                int64_t cols = n - j < block.n ? n - j : block.n;
                const TYPE *b = (const TYPE *)call->b + p * call->b_row + j * call->b_col;
                NAME(pack)(packed_b, b, cols, call->b_col, depth, call->b_row, tile.cols);
                NAME(tiles)
                (tile, rows, cols, depth, packed_a, packed_b, c + i * call->c_row + j, call->c_row,
                 p > 0 || call->accumulate);
            }
        }
    }
}
