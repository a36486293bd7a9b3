/* Products with few rows, such as those of a step of decoding: C = A B where A has at most
 * CPU_FEW_ROWS rows, so that the time is that of reading B. B is read once, where it is and in its
 * own dtype: nothing of it is packed or converted in memory. Each element of C is summed in the
 * order of cpu_kernel.c, whatever the number of rows and whatever part of the columns is asked. */
#ifndef ML_CPU_FEW_H
#define ML_CPU_FEW_H

#include "runtime/graph/graph.h"

enum { CPU_FEW_ROWS = 16 };

typedef struct {
    int64_t m, n, k; /* m <= CPU_FEW_ROWS */
    const float *a;  /* element (i, p) at i * a_row + p * a_col */
    int64_t a_row, a_col;
    const char *b; /* element (p, j) at p * b_row + j * b_col; one of the two strides is 1 */
    ml_dtype b_dtype;
    int64_t b_row, b_col;
    float *c; /* element (i, j) at i * c_row + j */
    int64_t c_row;
    bool accumulate; /* added to what C has */
} cpu_few_call;

bool cpu_few_reads(ml_dtype dtype); /* whether B may have it */

/* Columns first .. last - 1 of C. */
void cpu_few_product(const cpu_few_call *call, int64_t first, int64_t last);

#endif
