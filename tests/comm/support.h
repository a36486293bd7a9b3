/* Ranks as forked children of the test, for the tests of runtime/comm. */
#ifndef COMM_SUPPORT_H
#define COMM_SUPPORT_H

#include <sys/types.h>

#include "runtime/comm/comm.h"

enum { COMM_MOST = 16 };
/* What a rank does; its value is the process's exit code. */
typedef int comm_body(ml_comm *comm, void *argument);

typedef struct {
    int ranks, fd;
    pid_t pids[COMM_MOST];
} comm_job;
/* Start ranks that open a communicator on shared memory and run body; `errors` is where their
 * stderr is written (-1: this process's). */
void comm_start(comm_job *job, int ranks, comm_body *body, void *argument, int errors);
/* One rank, which opens by `launch`; the job's other fields must be set up. */
void comm_start_rank(comm_job *job, const ml_launch *launch, comm_body *body, void *argument,
                     int errors);
/* Wait for all; codes[i] is rank i's exit code, 128 + signal, or -1 for one that was killed
 * because it did not end within `seconds`, or was alone left and is rank `stopped`. Reaps all. */
void comm_finish(comm_job *job, double seconds, int stopped, int codes[COMM_MOST]);
/* Both, where all must succeed within 60 seconds. */
void comm_run(int ranks, comm_body *body, void *argument);
/* A port that the tests of this process have not used, and probably no process has. */
int comm_free_port(void);
/* How a rank is started that is to meet rank 0 there. */
ml_launch comm_launch_at(int rank, int world, int port);
/* ml_comm_options.timeout of ranks that are started from now on. */
void comm_set_timeout(int seconds);

#endif
