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

/* One row of tiles: `rows` rows of C by `n` columns. */
static void NAME(tiles)(const tile_kernel *tile, int64_t rows, int64_t n, int64_t k, const TYPE *a,
                        int64_t stride, tile_run *run, const TYPE *b, TYPE *c, int64_t ldc,
                        bool add) {
    for (int64_t j = 0; j < n; j += tile->cols) {
        int64_t cols = n - j < tile->cols ? n - j : tile->cols;
        if (rows == tile->rows && cols == tile->cols) {
            run(k, a, stride, b + j * k, c + j, ldc, add);
            continue;
        }
        TYPE edge[LARGEST_TILE];
        run(k, a, stride, b + j * k, edge, tile->cols, false);
        for (int64_t y = 0; y < rows; y++) {
            for (int64_t x = 0; x < cols; x++) {
                TYPE value = edge[y * tile->cols + x], *to = &c[y * ldc + j + x];
                *to = add ? *to + value : value;
            }
        }
    }
}

/* C (all rows, columns j .. j + cols - 1) and k from p to p + depth - 1; B's block is packed. */
static void NAME(block)(const cpu_kernel_call *call, const tile_kernel *tile, int64_t j,
                        int64_t cols, int64_t p, int64_t depth, const TYPE *packed, TYPE *last) {
    bool by_rows = call->a_col == 1, add = p > 0 || call->accumulate;
    int64_t stride = by_rows ? call->a_row : call->a_col, m = call->m;
    tile_run *run = by_rows ? tile->by_rows : tile->by_cols;
    const TYPE *a = (const TYPE *)call->a + p * call->a_col;
    TYPE *c = (TYPE *)call->c + j;
    bool direct = by_rows || call->a_row == 1;
    for (int64_t i = 0; i < m; i += tile->rows, a += tile->rows * call->a_row) {
        TYPE *to = c + i * call->c_row;
        int64_t rows = m - i < tile->rows ? m - i : tile->rows;
        if (direct && rows == tile->rows) {
            NAME(tiles)(tile, rows, cols, depth, a, stride, run, packed, to, call->c_row, add);
            continue;
        }
        NAME(pack_slow)(last, a, rows, call->a_row, 0, depth, call->a_col, tile->rows);
        NAME(tiles)
        (tile, rows, cols, depth, last, tile->rows, tile->by_cols, packed, to, call->c_row, add);
    }
}

static void NAME(product)(const cpu_kernel_call *call) {
    int64_t n = call->n, k = call->k;
    for (int64_t i = 0; i < call->m && k == 0 && !call->accumulate; i++) {
        memset((TYPE *)call->c + i * call->c_row, 0, (size_t)n * sizeof(TYPE));
    }
    tile_kernel tile = tile_for(call->dtype);
    int64_t wide = even_part(n, BLOCK_N, tile.cols), deep = cpu_kernel_depth(k);
    TYPE *last = call->packing;
    TYPE *packed = (TYPE *)((char *)call->packing + packed_bytes(tile.rows, deep, call->dtype));
    for (int64_t j = 0; j < n; j += wide) {
        int64_t cols = n - j < wide ? n - j : wide;
        for (int64_t p = 0; p < k; p += deep) {
            int64_t depth = k - p < deep ? k - p : deep;
            const TYPE *b = (const TYPE *)call->b + p * call->b_row + j * call->b_col;
            NAME(pack)(packed, b, cols, call->b_col, depth, call->b_row, tile.cols);
            NAME(block)(call, &tile, j, cols, p, depth, packed, last);
        }
    }
}
