#include "tests/comm/support.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/join_internal.h"
#include "tests/test.h"

static int timeout; /* of ranks that are started from now on */

void comm_set_timeout(int seconds) {
    timeout = seconds;
}

static _Noreturn void be_rank(const ml_launch *launch, comm_body *body, void *argument,
                              int errors) {
    ml_comm *comm;
    if (errors >= 0) dup2(errors, STDERR_FILENO);
    int code = 3;
    ml_launch own = *launch;
    own.options.timeout = timeout;
    if (ml_comm_open(&own, &comm) == ML_OK) {
        code = body(comm, argument);
        if (code && ml_error_last()->status != ML_OK)
            fprintf(stderr, "rank %d: %s\n", launch->rank, ml_error_last()->text);
        ml_comm_close(comm);
    } else {
        fprintf(stderr, "rank %d cannot open: %s\n  help: %s\n", launch->rank,
                ml_error_last()->text, ml_error_last()->help);
    }
    fflush(NULL);
    _exit(code);
}

void comm_start_rank(comm_job *job, const ml_launch *launch, comm_body *body, void *argument,
                     int errors) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) be_rank(launch, body, argument, errors);
    REQUIRE(pid > 0);
    job->pids[launch->rank] = pid;
}

void comm_start(comm_job *job, int ranks, comm_body *body, void *argument, int errors) {
    *job = (comm_job){.ranks = ranks, .fd = comm_segment_new(ranks)};
    REQUIRE(job->fd >= 0);
    for (int i = 0; i < ranks; i++) {
        ml_launch launch = {.rank = i, .world = ranks, .local_rank = i, .source = "a test"};
        snprintf(launch.address, sizeof launch.address, "fd:%d", job->fd);
        comm_start_rank(job, &launch, body, argument, errors);
    }
}

static bool reap(comm_job *job, int rank, int *code) {
    int status;
    if (waitpid(job->pids[rank], &status, WNOHANG) <= 0) return false;
    *code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    job->pids[rank] = 0;
    return true;
}

void comm_finish(comm_job *job, double seconds, int stopped, int codes[COMM_MOST]) {
    double end = ml_clock_now() + seconds;
    int left = 0;
    for (int i = 0; i < job->ranks; i++) left += job->pids[i] > 0;
    while (left) {
        for (int i = 0; i < job->ranks; i++)
            if (job->pids[i] && reap(job, i, &codes[i])) left--;
        bool late = ml_clock_now() > end;
        for (int i = 0; i < job->ranks; i++) {
            if (!job->pids[i] || !(late || (left == 1 && i == stopped))) continue;
            kill(job->pids[i], SIGKILL);
            waitpid(job->pids[i], NULL, 0);
            job->pids[i] = 0;
            codes[i] = -1;
            left--;
        }
        usleep(3000);
    }
    if (job->fd >= 0) close(job->fd);
}

void comm_run(int ranks, comm_body *body, void *argument) {
    comm_job job;
    int codes[COMM_MOST];
    comm_start(&job, ranks, body, argument, -1);
    comm_finish(&job, 60, -1, codes);
    for (int i = 0; i < ranks; i++)
        EXPECT(!codes[i], "rank %d of %d ends with %d", i, ranks, codes[i]);
}

static bool is_free(int port) {
    int fd = join_address("127.0.0.1", port, true, 0);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/* Other tests choose theirs at the same time. */
int comm_free_port(void) {
    static unsigned calls;
    for (;;) {
        int port = 21000 + (int)(((unsigned)getpid() * 1009u + calls++) % 1900u * 16u), more = 0;
        while (more <= JOIN_PORTS && is_free(port + more)) more++;
        if (more > JOIN_PORTS) return port;
    }
}

ml_launch comm_launch_at(int rank, int world, int port) {
    ml_launch launch = {.rank = rank, .world = world, .local_rank = rank, .source = "a test"};
    snprintf(launch.address, sizeof launch.address, "127.0.0.1:%d", port);
    snprintf(launch.secret, sizeof launch.secret, "only the job knows");
    snprintf(launch.job, sizeof launch.job, "job %d", port);
    return launch;
}
