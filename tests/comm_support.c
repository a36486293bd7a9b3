#include "tests/comm_support.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/comm/parts.h"
#include "tests/test.h"

static _Noreturn void be_rank(comm_job *job, int rank, comm_body *body, void *argument,
                              int errors) {
    ml_launch launch = {.rank = rank, .world = job->ranks, .local_rank = rank, .source = "a test"};
    ml_comm *comm;
    if (errors >= 0) dup2(errors, STDERR_FILENO);
    snprintf(launch.address, sizeof launch.address, "fd:%d", job->fd);
    int code = 3;
    if (ml_comm_open(&launch, &comm) == ML_OK) {
        code = body(comm, argument);
        if (code && ml_error_last()->status != ML_OK)
            fprintf(stderr, "rank %d: %s\n", rank, ml_error_last()->text);
        ml_comm_close(comm);
    } else {
        fprintf(stderr, "rank %d cannot open: %s\n", rank, ml_error_last()->text);
    }
    fflush(NULL);
    _exit(code);
}

void comm_start(comm_job *job, int ranks, comm_body *body, void *argument, int errors) {
    *job = (comm_job){.ranks = ranks, .fd = comm_segment_new(ranks)};
    REQUIRE(job->fd >= 0);
    fflush(NULL);
    for (int i = 0; i < ranks; i++) {
        job->pids[i] = fork();
        if (job->pids[i] == 0) be_rank(job, i, body, argument, errors);
        REQUIRE(job->pids[i] > 0);
    }
}

void comm_finish(comm_job *job, double seconds, int codes[COMM_MOST]) {
    double end = comm_now() + seconds;
    for (int i = 0; i < job->ranks; i++) {
        int status = 0;
        pid_t pid;
        while ((pid = waitpid(job->pids[i], &status, WNOHANG)) == 0 && comm_now() < end)
            usleep(5000);
        if (pid == 0) {
            kill(job->pids[i], SIGKILL);
            waitpid(job->pids[i], &status, 0);
        }
        codes[i] = pid == 0 ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    close(job->fd);
}

void comm_run(int ranks, comm_body *body, void *argument) {
    comm_job job;
    int codes[COMM_MOST];
    comm_start(&job, ranks, body, argument, -1);
    comm_finish(&job, 60, codes);
    for (int i = 0; i < ranks; i++)
        if (codes[i]) test_fail("rank %d of %d ends with %d", i, ranks, codes[i]);
}

int comm_children(void) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    int count = 0, fd = open(path, O_RDONLY);
    if (fd < 0) return 0;
    ssize_t size = read(fd, text, sizeof text);
    for (ssize_t i = 0; i < size; i++) count += text[i] == ' ';
    close(fd);
    return count;
}
