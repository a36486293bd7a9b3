/* WRITE_ROWS: a unit owns a range of the cache's rows and walks over all tokens. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY write_rows
#define ELEMENT float
#define ROWS 4096LL
#define TOKENS 8LL
#define COLUMNS 128LL
#define UNITS 4LL
#define CACHE_ROW 128LL
#define RESULT_ROW 128LL
#define INDEX_TOKEN(token) (token)
#define VALUE_TOKEN(token) (token * 128LL)
#define CACHE_COLUMN(column) (column)
#define VALUE_COLUMN(column) (column)
#define RESULT_COLUMN(column) (column)
#endif

#define write_part NAME(write_part)

static void write_part(const ELEMENT *cache, const int *index, const ELEMENT *value,
                       ELEMENT *result, long long first, long long last) {
    if (result != cache)
        for (long long row = first; row < last; row++)
            for (long long column = 0; column < COLUMNS; column++)
                result[row * RESULT_ROW + RESULT_COLUMN(column)] =
                    cache[row * CACHE_ROW + CACHE_COLUMN(column)];
    for (long long token = 0; token < TOKENS; token++) {
        const long long row = index[INDEX_TOKEN(token)];
        if (row < first || row >= last) continue;
        const ELEMENT *from = value + VALUE_TOKEN(token);
        ELEMENT *to = result + row * RESULT_ROW;
#pragma GCC ivdep
        for (long long column = 0; column < COLUMNS; column++)
            to[RESULT_COLUMN(column)] = from[VALUE_COLUMN(column)];
    }
}

void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    write_part((const ELEMENT *)p[0], (const int *)p[1], (const ELEMENT *)p[2], (ELEMENT *)p[3],
               begin * ROWS / UNITS, end * ROWS / UNITS);
}
