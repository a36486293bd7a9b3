/* Ranks that die, stop, hang or leave, with no launcher: what the others say and how they end. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/comm_internal.h"
#include "tests/comm/support.h"
#include "tests/test.h"

enum { RANKS = 4, FAULT_STEP = 5, ELEMENTS = 50000, TIMEOUT = 2 };
typedef enum { KILL, STOP, SEGFAULT, HANG, LEAVE, BUSY } fault;
static const char *const says[] = {"died",
                                   "has been stopped or frozen",
                                   "died",
                                   "shows no progress",
                                   "has ended while others wait for it",
                                   "died"};

typedef struct {
    int victim;
    fault kind;
    bool steps; /* print them */
} plan;

static void suffer(const plan *p, int rank) {
    if (p->kind == BUSY && rank == (p->victim + 1) % RANKS)
        for (;;) sleep(100); /* in something that cannot be interrupted */
    if (rank != p->victim) return;
    if (p->kind == KILL || p->kind == BUSY) raise(SIGKILL);
    if (p->kind == STOP) raise(SIGSTOP);
    if (p->kind == SEGFAULT) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if (p->kind == HANG)
        for (;;) sleep(100);
}

static int train(ml_comm *comm, void *argument) {
    const plan *p = argument;
    int rank = ml_comm_rank(comm);
    float *sums = calloc(ELEMENTS, sizeof *sums);
    ml_status status = sums ? ML_OK : ML_NO_MEMORY;
    for (int step = 1; status == ML_OK && step <= 100000; step++) {
        char note[128];
        snprintf(note, sizeof note, "step %d, all-reduce of grad gpt.lua:7", step);
        ml_comm_note(comm, note);
        if (step == FAULT_STEP) suffer(p, rank);
        if (p->steps) ml_comm_step(comm);
        if (step == FAULT_STEP && p->kind == LEAVE && rank == p->victim) break;
        status = ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, sums, sums,
                                 ELEMENTS, ML_F32, ML_COMBINE_SUM);
    }
    free(sums);
    if (status == ML_OK) return 0;
    ml_error error = *ml_error_last();
    bool reports = ml_comm_fail(comm, error.text);
    if (reports) fprintf(stderr, "reported by rank %d: %s\n", rank, error.text);
    *ml_error_last() = (ml_error){0};
    return ml_comm_peer_failed() ? ML_EXIT_PEER : 1;
}

/* What the ranks of a job wrote. */
static void read_all(FILE *file, char *text, size_t size) {
    rewind(file);
    size_t used = fread(text, 1, size - 1, file);
    text[used] = 0;
    fclose(file);
}

static int occurrences(const char *text, const char *word) {
    int count = 0;
    for (; (text = strstr(text, word)); text++) count++;
    return count;
}

static void check_job(const plan *p, int victim_pid, const int *codes, const char *text) {
    char named[128];
    snprintf(named, sizeof named, "rank %d (pid %d) %s", p->victim, victim_pid, says[p->kind]);
    bool good = strstr(text, named) && strstr(text, "last seen in: step 5, all-reduce of grad") &&
                strstr(text, "waits in all-reduce of 50000 f32 (sum): step 5") &&
                occurrences(text, "rank ") <= 4 && occurrences(text, "reported by") == 1;
    EXPECT(good, "fault %d of rank %d: expected \"%s\" once in\n%s", p->kind, p->victim, named,
           text);
    for (int i = 0; i < RANKS; i++)
        EXPECT(!(i != p->victim && codes[i] != ML_EXIT_PEER),
               "fault %d of rank %d: rank %d ends with %d", p->kind, p->victim, i, codes[i]);
}

/* The same fault of each rank in turn; the jobs run side by side, for they mostly wait. */
static void each_rank(fault kind) {
    comm_job jobs[RANKS];
    plan plans[RANKS];
    FILE *errors[RANKS];
    comm_set_timeout(TIMEOUT);
    for (int i = 0; i < RANKS; i++) {
        plans[i] = (plan){i, kind, .steps = false};
        errors[i] = tmpfile();
        REQUIRE(errors[i]);
        comm_start(&jobs[i], RANKS, train, &plans[i], fileno(errors[i]));
    }
    for (int i = 0; i < RANKS; i++) {
        int codes[COMM_MOST], pid = jobs[i].pids[i];
        char text[8192];
        comm_finish(&jobs[i], 30, i, codes);
        read_all(errors[i], text, sizeof text);
        check_job(&plans[i], pid, codes, text);
        if (kind == KILL) CHECK_EQ_INT(codes[i], 128 + SIGKILL);
        if (kind == LEAVE) CHECK_EQ_INT(codes[i], 0);
    }
    comm_set_timeout(0);
}

TEST(fault, killed_ranks) {
    each_rank(KILL);
}
TEST(fault, stopped_ranks) {
    each_rank(STOP);
}
TEST(fault, crashed_ranks) {
    each_rank(SEGFAULT);
}
TEST(fault, ranks_that_hang) {
    each_rank(HANG);
}

/* With no timeout set: before anything is known of how long steps take, and after. */
TEST(fault, ranks_that_hang_by_default) {
    plan plans[2] = {{0, HANG, .steps = false}, {2, HANG, .steps = true}};
    comm_job jobs[2];
    FILE *errors[2];
    for (int i = 0; i < 2; i++) {
        errors[i] = tmpfile();
        REQUIRE(errors[i]);
        comm_start(&jobs[i], RANKS, train, &plans[i], fileno(errors[i]));
    }
    for (int i = 0; i < 2; i++) {
        int codes[COMM_MOST], victim = plans[i].victim, pid = jobs[i].pids[victim];
        char text[8192];
        comm_finish(&jobs[i], 30, victim, codes);
        read_all(errors[i], text, sizeof text);
        check_job(&plans[i], pid, codes, text);
    }
}

/* Rank 0 waits for 1, which waits for 2, which is slow, or busy with something long. */
static int wait_in_a_row(ml_comm *comm, void *argument) {
    static const int pairs[2][2] = {{0, 1}, {1, 2}};
    bool busy = *(bool *)argument;
    float value = 1, sum = 0;
    ml_status status = ML_OK;
    for (int i = 1; i >= 0 && status == ML_OK; i--) {
        int rank = ml_comm_rank(comm), own[2] = {pairs[i][0], pairs[i][1]}, alone[1] = {rank};
        bool member = rank == own[0] || rank == own[1];
        ml_group *group;
        status = ml_comm_group(comm, member ? own : alone, member ? 2 : 1, &group);
        if (status == ML_OK && i == 1 && rank == 2 && busy)
            ml_comm_busy(comm, "a long compilation");
        for (int k = 0; k < 8 && i == 1 && rank == 2; k++) {
            usleep(500000);
            if (!busy) ml_comm_progress(comm);
        }
        if (status == ML_OK && member)
            status = ml_comm_collect(group, ML_COLLECTIVE_ALL_REDUCE, &value, &sum, 1, ML_F32,
                                     ML_COMBINE_SUM);
    }
    return status == ML_OK ? 0 : 1;
}

/* No rank is reported for waiting while any rank makes progress. */
TEST(fault, slow_behind_one_that_waits) {
    for (int busy = 0; busy < 2; busy++) {
        comm_job job;
        int codes[COMM_MOST];
        bool argument = busy != 0;
        comm_set_timeout(1);
        comm_start(&job, 3, wait_in_a_row, &argument, -1);
        comm_finish(&job, 30, -1, codes);
        for (int i = 0; i < 3; i++) CHECK_EQ_INT(codes[i], 0);
        comm_set_timeout(0);
    }
}
TEST(fault, ranks_that_leave) {
    each_rank(LEAVE);
}
TEST(fault, ranks_too_busy_to_hear) {
    each_rank(BUSY);
}

/* A job that is stopped as a whole (Ctrl-Z) and continues later reports no rank. */
static int pause_together(ml_comm *comm, void *argument) {
    (void)argument;
    float value = 1, sum = 0;
    double end = ml_clock_now() + 5;
    ml_status status = ML_OK;
    int more = 1, all = 1;
    while (status == ML_OK && all) {
        more = ml_clock_now() < end;
        status = ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, &value, &sum, 1,
                                 ML_F32, ML_COMBINE_SUM);
        if (status == ML_OK)
            status = ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, &more, &all,
                                     1, ML_I32, ML_COMBINE_MIN);
        usleep(1000);
    }
    return status == ML_OK ? 0 : 1;
}

TEST(fault, whole_job_pauses) {
    comm_job job;
    int codes[COMM_MOST];
    comm_set_timeout(TIMEOUT);
    comm_start(&job, RANKS, pause_together, NULL, -1);
    usleep(500000);
    for (int i = 0; i < RANKS; i++) kill(job.pids[i], SIGSTOP);
    usleep((TIMEOUT + 1) * 1000000);
    for (int i = 0; i < RANKS; i++) kill(job.pids[i], SIGCONT);
    comm_finish(&job, 30, -1, codes);
    for (int i = 0; i < RANKS; i++) CHECK_EQ_INT(codes[i], 0);
    comm_set_timeout(0);
}
