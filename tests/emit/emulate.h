/* C++ that emulates a GPU's threads, compiled by the system's C++ compiler. Objects are kept in the
 * kernel cache, so that kernels that have not changed are compiled once. */
#ifndef ML_TEST_EMULATE_H
#define ML_TEST_EMULATE_H

#include <stdio.h>

/* The test is skipped where there is no C++ compiler. */
void emulate_need(void);
/* The source, to be written to and handed to emulate_load. */
FILE *emulate_source(void);
/* The object, to be closed by dlclose; NULL, and a failed test, where the source does not compile.
 * Includes are looked for from the repository's root. */
void *emulate_load(FILE *source);

#endif
