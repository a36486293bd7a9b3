/* A pool of threads that sleep between jobs. Used to run kernels and to compile them.
 *
 * ml_pool_run splits [0, units) into `parts` ranges whose borders depend on units and parts alone
 * (never on timing), hands them out in order and returns when all are done. The calling thread
 * works too. A job that fails stores its error; the first failing range's status is returned and
 * its error becomes the caller's. One job at a time; not reentrant. */
#ifndef ML_POOL_H
#define ML_POOL_H

#include "runtime/base/status.h"

typedef struct ml_pool ml_pool;
typedef void ml_job(void *context, int64_t begin, int64_t end, int thread);

ml_pool *ml_pool_new(int threads); /* NULL when exhausted; threads counts the caller */
void ml_pool_free(ml_pool *pool);
int ml_pool_threads(const ml_pool *pool);
ml_status ml_pool_run(ml_pool *pool, int64_t units, int64_t parts, ml_job *job, void *context);
int ml_cpu_count(void); /* cores this process may use */

#endif
