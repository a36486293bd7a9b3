/* SCATTER_ADD: a unit has a block of columns and a range of rows and walks over all tokens. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY scatter_add
#define MEMORY float  /* of the result */
#define ELEMENT float /* of the value */
#define ADDER float
#define SUMS_MEMORY float
#define LOAD
#define STORE
#define BASED 0  /* on a third operand, which mostly is at the result's address */
#define NARROW 0 /* sums are in a workspace, as they need a wider type than the result */
#define BASE_AT 2
#define SUMS_AT 2
#define RESULT_AT 2
#define TOKENS 1000LL
#define ROWS 100LL
#define COLUMNS 64LL
#define ROW_PARTS 1LL
#define COLUMN_BLOCKS 1LL
#define COLUMN_BLOCK 64LL
#define ROW_STRIDE 64LL
#define SUMS_ROW 64LL
#define INDEX_BATCH(batch) (batch * 1000LL)
#define INDEX_TOKEN(token) (token)
#define VALUE_BATCH(batch) (batch * 64000LL)
#define VALUE_TOKEN(token) (token * 64LL)
#define VALUE_COLUMN(column) (column)
#define RESULT_BATCH(batch) (batch * 6400LL)
#define RESULT_COLUMN(column) (column)
#define SUMS_BATCH(batch) (batch * 6400LL)
#define SUMS_COLUMN(column) (column)
#endif

#define add_unit NAME(add_unit)

static void add_unit(const int *index, const ELEMENT *value, const MEMORY *base, SUMS_MEMORY *sums,
                     MEMORY *result, long long batch, long long first_row, long long last_row,
                     long long first_column, long long last_column) {
    for (long long row = first_row; row < last_row; row++)
        for (long long column = first_column; column < last_column; column++)
            if (!BASED)
                sums[row * SUMS_ROW + SUMS_COLUMN(column)] = 0;
            else if (base != result)
                result[row * ROW_STRIDE + RESULT_COLUMN(column)] =
                    base[row * ROW_STRIDE + RESULT_COLUMN(column)];
    for (long long token = 0; token < TOKENS; token++) {
        long long row = index[INDEX_TOKEN(token)];
        if (row < first_row || row >= last_row) continue;
        const ELEMENT *from = value + VALUE_TOKEN(token);
        SUMS_MEMORY *to = sums + row * SUMS_ROW;
#pragma GCC ivdep
        for (long long column = first_column; column < last_column; column++)
            to[SUMS_COLUMN(column)] =
                (ADDER)to[SUMS_COLUMN(column)] + (ADDER)LOAD(from[VALUE_COLUMN(column)]);
    }
    if (NARROW)
        for (long long row = first_row; row < last_row; row++)
            for (long long column = first_column; column < last_column; column++)
                result[row * ROW_STRIDE + RESULT_COLUMN(column)] =
                    STORE(sums[row * SUMS_ROW + SUMS_COLUMN(column)]);
}
void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        long long part = unit % ROW_PARTS, block = unit / ROW_PARTS % COLUMN_BLOCKS;
        long long batch = unit / (ROW_PARTS * COLUMN_BLOCKS);
        long long last = (block + 1) * COLUMN_BLOCK;
        add_unit((const int *)p[0] + INDEX_BATCH(batch), (const ELEMENT *)p[1] + VALUE_BATCH(batch),
                 (const MEMORY *)p[BASE_AT] + RESULT_BATCH(batch),
                 (SUMS_MEMORY *)p[SUMS_AT] + SUMS_BATCH(batch),
                 (MEMORY *)p[RESULT_AT] + RESULT_BATCH(batch), batch, part * ROWS / ROW_PARTS,
                 (part + 1) * ROWS / ROW_PARTS, block * COLUMN_BLOCK,
                 last < COLUMNS ? last : COLUMNS);
    }
}
