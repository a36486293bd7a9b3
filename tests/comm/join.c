/* The rendezvous: ranks that find each other by an address, what launchers leave in the
 * environment, strangers, replays, and what is said when ranks do not come. */
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/wire_internal.h"
#include "tests/comm/support.h"
#include "tests/test.h"

static int add_up(ml_comm *comm, void *argument) {
    (void)argument;
    int world = ml_comm_world(comm), sum = 0, one = 1;
    if (ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, &one, &sum, 1, ML_I32,
                        ML_COMBINE_SUM) != ML_OK)
        return 1;
    if (sum != world) return 2;
    return ml_comm_agree(comm, 7, "the plan") == ML_OK ? 0 : 4;
}

static void finish_well(comm_job *job) {
    int codes[COMM_MOST];
    comm_finish(job, 30, -1, codes);
    for (int i = 0; i < job->ranks; i++) EXPECT(!codes[i], "rank %d ends with %d", i, codes[i]);
}

TEST(comm, join_by_address) {
    int port = comm_free_port();
    comm_job job = {.ranks = 4, .fd = -1};
    for (int i = 3; i >= 0; i--) { /* rank 0 comes last */
        ml_launch launch = comm_launch_at(i, 4, port);
        comm_start_rank(&job, &launch, add_up, NULL, -1);
        usleep(20000);
    }
    finish_well(&job);
}

/* ---- Several hosts ----------------------------------------------------------------------------
 */

static int between_hosts(ml_comm *comm, void *argument) {
    (void)argument;
    int rank = ml_comm_rank(comm), in = 1, out;
    char text[100] = "";
    ml_group *g;
    if (rank == 0) snprintf(text, sizeof text, "an id that all need");
    if (ml_comm_host_ranks(comm) != (rank < 2 ? 2 : 1)) return 13;
    if (ml_comm_share(comm, text, sizeof text) != ML_OK || strcmp(text, "an id that all need"))
        return 1;
    if (ml_comm_agree(comm, 7, "the plan") != ML_OK || ml_comm_barrier(comm) != ML_OK) return 2;
    if (ml_comm_agree(comm, rank == 1, "the plan") != ML_INVALID) return 4;
    int pair[] = {rank / 2 * 2, rank / 2 * 2 + 1};
    if (ml_comm_group(comm, pair, 2, &g) != ML_OK || ml_group_rank(g) != rank % 2) return 5;
    if (ml_comm_collect(g, ML_COLLECTIVE_ALL_REDUCE, &in, &out, 1, ML_I32, ML_COMBINE_SUM) !=
        ML_INVALID)
        return 6;
    if (!strstr(ml_error_last()->text, "must be on one host")) return 7;
    ml_channel *channel; /* for GPUs it can be made */
    if (ml_comm_channel(comm, 0, 1, 0, 100, &channel) != ML_OK || (channel != NULL) != (rank < 2))
        return 9;
    if (rank == 0 && ml_channel_send(channel, &in, sizeof in) != ML_INVALID) return 10;
    if (rank == 1 && ml_channel_receive(channel, &out, sizeof out) != ML_INVALID) return 11;
    if (channel && !strstr(ml_error_last()->text, "must be on one host")) return 12;
    ml_comm_part(comm); /* and go on all the same */
    return ml_comm_barrier(comm) == ML_OK ? 0 : 8;
}

/* Ranks 0 and 1 exchange two words, ranks 2 and 3 none; all ranks leave, once the last is there. */
static int swap_and_part(ml_comm *comm, void *argument) {
    atomic_bool *last = argument; /* shared by all ranks */
    int rank = ml_comm_rank(comm), other = rank < 2 ? 1 - rank : -1;
    for (int round = 0; round < 2; round++) {
        int64_t mine[2] = {rank * 10 + round, -1 - rank}, theirs[2] = {7, 7};
        if (ml_comm_swap(comm, other, mine, theirs, 2) != ML_OK) return 1;
        if (theirs[0] != (other < 0 ? 0 : other * 10 + round)) return 2;
        if (theirs[1] != (other < 0 ? 0 : -1 - other)) return 4;
    }
    if (rank == 3) usleep(300000);
    if (rank == 3) atomic_store(last, true);
    double before = ml_clock_now();
    ml_comm_part(comm);
    if (ml_clock_now() - before > 3 || !atomic_load(last)) return 5;
    if (rank == 2) return 0; /* ends without another word */
    before = ml_clock_now();
    ml_comm_part(comm);
    return ml_clock_now() - before < 3 ? 0 : 6;
}

static int die_between_hosts(ml_comm *comm, void *argument) {
    if (ml_comm_barrier(comm) != ML_OK) return 1;
    if (ml_comm_rank(comm) == *(int *)argument) raise(SIGSTOP);
    if (ml_comm_rank(comm) == *(int *)argument - 10) _exit(3);
    if (ml_comm_barrier(comm) != ML_DEVICE) return 2;
    char named[64];
    snprintf(named, sizeof named, "rank %d (pid ", *(int *)argument % 10);
    if (!strstr(ml_error_last()->text, named)) return 4;
    return ml_comm_peer_failed() ? ML_EXIT_PEER : 5;
}

static void start_hosts(comm_job *job, comm_body *body, void *argument, int errors) {
    static const char *const boots[] = {"host a", "host a", "host b", "host c"};
    int port = comm_free_port();
    *job = (comm_job){.ranks = 4, .fd = -1};
    for (int i = 0; i < 4; i++) {
        ml_launch launch = comm_launch_at(i, 4, port);
        join_boot = boots[i];
        comm_start_rank(job, &launch, body, argument, errors);
    }
    join_boot = NULL;
}

TEST(comm, several_hosts) {
    comm_job job;
    start_hosts(&job, between_hosts, NULL, -1);
    finish_well(&job);
}

TEST(comm, swap_and_part) {
    comm_job job;
    atomic_bool *last =
        mmap(NULL, sizeof *last, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(last != MAP_FAILED);
    start_hosts(&job, swap_and_part, last, -1);
    finish_well(&job);
    atomic_store(last, false);
    comm_run(4, swap_and_part, last);
    munmap(last, sizeof *last);
}

/* Rank `fault` stops, or rank fault - 10 ends without a word. */
TEST(fault, ranks_on_several_hosts) {
    static const int faults[] = {0, 2, 10, 12};
    comm_set_timeout(2);
    for (int k = 0; k < 4; k++) {
        comm_job job;
        int codes[COMM_MOST], fault = faults[k];
        int nowhere = open("/dev/null", O_WRONLY);
        start_hosts(&job, die_between_hosts, &fault, nowhere);
        comm_finish(&job, 30, fault, codes);
        close(nowhere);
        for (int i = 0; i < 4; i++)
            CHECK_EQ_INT(codes[i], i == fault ? -1 : i == fault - 10 ? 3 : ML_EXIT_PEER);
    }
    comm_set_timeout(0);
}

/* What ranks on several hosts do under a timeout of a second; the one at fault (-1: none) fails. */
static void check_hosts(comm_body *body, bool argument, int fault) {
    comm_job job;
    int codes[COMM_MOST], nowhere = open("/dev/null", O_WRONLY);
    comm_set_timeout(1);
    start_hosts(&job, body, &argument, nowhere);
    comm_finish(&job, 30, -1, codes);
    close(nowhere);
    for (int i = 0; i < 4; i++) CHECK_EQ_INT(codes[i], i == fault);
    comm_set_timeout(0);
}

/* Below, ranks wait by ml_comm_waiting, to which the test passes times that no clock measured,
 * under the limits of jobs without a timeout: how fast the machine is does not matter. */
static const double SOON = 25; /* seconds, for what other ranks report */

static void check_patience(comm_body *body) {
    comm_job job;
    int codes[COMM_MOST], nowhere = open("/dev/null", O_WRONLY);
    start_hosts(&job, body, NULL, nowhere);
    comm_finish(&job, 60, -1, codes);
    close(nowhere);
    for (int i = 0; i < 4; i++) CHECK_EQ_INT(codes[i], 0);
}

static const comm_record *record_of(const ml_comm *comm, int rank) {
    return &comm->segment->ranks[rank];
}

static bool soon(ml_comm *comm, bool (*holds)(const ml_comm *)) {
    const double end = ml_clock_now() + SOON;
    while (!holds(comm) && ml_clock_now() < end) usleep(10000);
    return holds(comm);
}

static bool hears_busy(const ml_comm *comm) {
    return comm_look(comm).busy;
}

static bool hears_end(const ml_comm *comm) {
    return atomic_load(&record_of(comm, 2)->state) == COMM_DONE;
}

static bool hears_failure(const ml_comm *comm) {
    return atomic_load(&comm->segment->failed) != 0;
}

/* Each has parted once it waits, or rank 2 once it does not: beats that come later report that. */
static bool hears_who_waits(const ml_comm *comm) {
    bool right = true;
    for (int i = 1; i < 4; i++)
        right = right && atomic_load(&record_of(comm, i)->parted) > 0 &&
                (atomic_load(&record_of(comm, i)->waiting) != 0) == (i != 2);
    return right;
}

/* Seconds without progress of any rank after which this one gives up; at least `most`: it has not.
 */
static double patience(ml_comm *comm, double most) {
    uint64_t progress = comm->outside_progress;
    double waited = 0;
    ml_status status = ml_comm_waiting(comm, 0);
    while (status == ML_OK && waited < most) {
        status = ml_comm_waiting(comm, 0.1);
        waited = comm->outside_progress == progress ? waited + 0.1 : 0.1;
        progress = comm->outside_progress;
    }
    return waited;
}

/* Rank 0, which knows all, accuses rank 2 after these seconds; the others hear it. */
static int accuse(ml_comm *comm, double limit, const char *why) {
    if (ml_comm_rank(comm) == 0 && fabs(patience(comm, 2 * limit) - limit) > 0.2) return 3;
    if (!soon(comm, hears_failure)) return 4;
    ml_comm_waited(comm);
    if (ml_comm_check(comm) != ML_DEVICE) return 5;
    const char *text = ml_error_last()->text;
    return strstr(text, "rank 2 (pid ") != NULL && strstr(text, why) != NULL ? 0 : 6;
}

/* All wait for rank 2, on another host, which compiles until they have waited for long. */
static int wait_for_busy(ml_comm *comm, void *argument) {
    (void)argument;
    const int rank = ml_comm_rank(comm);
    if (rank == 2) ml_comm_busy(comm, "compiling kernels");
    if (ml_comm_barrier(comm) != ML_OK) return 1;
    if (rank != 2 && !soon(comm, hears_busy)) return 2;
    const double most = 5 * comm_late_limit(comm, false);
    if (rank != 2 && patience(comm, most) < most) return 3;
    ml_comm_waited(comm);
    wire_part(comm, 1, ml_clock_now() + SOON);
    return ml_comm_barrier(comm) == ML_OK ? 0 : 4;
}

/* The same where it is not busy: it is accused. */
static int wait_for_idle(ml_comm *comm, void *argument) {
    (void)argument;
    const int rank = ml_comm_rank(comm);
    if (ml_comm_barrier(comm) != ML_OK) return 1;
    if (rank != 2) ml_comm_waiting(comm, 0);
    if (rank != 0) wire_part(comm, 1, ml_clock_now());
    if (rank == 0 && !soon(comm, hears_who_waits)) return 2;
    return accuse(comm, comm_late_limit(comm, false), "shows no progress");
}

TEST(fault, busy_on_another_host) {
    check_patience(wait_for_busy);
    check_patience(wait_for_idle);
}

/* Rank 2, on another host, ends; its last heartbeat said that it waits and is busy. */
static bool hears_busy_wait(const ml_comm *comm) {
    const comm_record *ended = record_of(comm, 2);
    bool right = atomic_load(&ended->busy) && atomic_load(&ended->waiting);
    for (int i = 1; i < 4; i += 2)
        right = right && atomic_load(&record_of(comm, i)->parted) > 0 &&
                atomic_load(&record_of(comm, i)->waiting) != 0;
    return right;
}

static int wait_for_ended(ml_comm *comm, void *argument) {
    (void)argument;
    const int rank = ml_comm_rank(comm);
    if (ml_comm_barrier(comm) != ML_OK) return 1;
    if (rank == 2) ml_comm_busy(comm, "compiling kernels");
    ml_comm_waiting(comm, 0);
    if (rank == 0 && !soon(comm, hears_busy_wait)) return 2;
    wire_part(comm, 1, ml_clock_now() + (rank == 2 ? SOON : 0)); /* rank 2: until rank 0 hears it */
    if (rank == 2) return 0;
    if (rank == 0 && !soon(comm, hears_end)) return 7;
    return accuse(comm, comm_stale_limit(0), "has ended while others wait for it");
}

TEST(fault, ended_on_another_host) {
    check_patience(wait_for_ended);
}

/* Rank 2, on another host, parts and ends long before the others, who do not need it. */
static int end_early(ml_comm *comm, void *argument) {
    (void)argument;
    if (ml_comm_barrier(comm) != ML_OK) return 1;
    if (ml_comm_rank(comm) == 2) {
        wire_part(comm, 1, ml_clock_now());
        return 0;
    }
    usleep(2600000);
    if (ml_comm_check(comm) != ML_OK) return 2;
    double before = ml_clock_now();
    ml_comm_part(comm);
    return ml_clock_now() - before < 1 ? 0 : 3;
}

TEST(comm, ends_early_on_another_host) {
    comm_job job;
    comm_set_timeout(1);
    start_hosts(&job, end_early, NULL, -1);
    finish_well(&job);
    comm_set_timeout(0);
}

/* Rank 3, on another host, is late for an exchange: it makes progress meanwhile, or hangs. */
static int come_late(ml_comm *comm, void *argument) {
    bool hangs = *(bool *)argument;
    if (ml_comm_barrier(comm) != ML_OK) return 1;
    for (int i = 0; i < 7 && ml_comm_rank(comm) == 3; i++) {
        usleep(hangs ? 500000 : 250000);
        if (!hangs) ml_comm_note(comm, "step 3");
    }
    double began = ml_clock_now();
    ml_status status = ml_comm_barrier(comm);
    if (!hangs) return status == ML_OK ? 0 : 2;
    if (status != ML_DEVICE || ml_clock_now() - began > 4) return 3;
    const char *text = ml_error_last()->text;
    return strstr(text, "rank 3 (pid ") && strstr(text, "does not answer") ? 0 : 4;
}

TEST(fault, late_on_another_host) {
    check_hosts(come_late, false, -1);
    check_hosts(come_late, true, 3);
}

/* Beats pass while the ranks exchange nothing, and do not disturb what they exchange then. */
static int idle_between_hosts(ml_comm *comm, void *argument) {
    (void)argument;
    for (int i = 0; i < 3; i++) {
        usleep(1300000u * (unsigned)(ml_comm_rank(comm) == i));
        if (ml_comm_agree(comm, (uint64_t)i, "the plan") != ML_OK) return 1;
    }
    for (int i = 0; i < 300; i++)
        if (ml_comm_agree(comm, (uint64_t)i, "the plan") != ML_OK) return 2;
    return 0;
}

TEST(comm, idle_hosts) {
    comm_job job;
    start_hosts(&job, idle_between_hosts, NULL, -1);
    finish_well(&job);
}

/* ---- Strangers --------------------------------------------------------------------------------
 */

static int knock(int port) {
    int fd = -1;
    for (int i = 0; i < 300 && fd < 0; i++) {
        fd = join_address("127.0.0.1", port, false, ml_clock_now() + 1);
        if (fd < 0) usleep(10000);
    }
    REQUIRE(fd >= 0);
    return fd;
}

/* Whether the other side closes without another byte. */
static bool is_closed(int fd) {
    char byte;
    bool closed =
        !join_read(fd, &byte, 1, ml_clock_now() + 2) && join_wait(fd, 1, ml_clock_now() + 1);
    join_close(&fd);
    return closed;
}

/* A handshake as rank 1 by hand, which is recorded; the connection, or -1. */
static int record(int port, const ml_launch *launch, const char *secret, join_hello *hello,
                  join_answer *answer) {
    join_job job = {.launch = launch};
    join_challenge challenge;
    keyed_digest k;
    keyed_start(&k, secret, strlen(secret));
    keyed_add(&k, launch->job, strlen(launch->job) + 1);
    keyed_end(&k, job.key);
    int fd = knock(port);
    memcpy(hello->magic, JOIN_MAGIC, 8);
    hello->rank = (uint32_t)launch->rank;
    hello->world = (uint32_t)launch->world;
    join_random(hello->nonce, sizeof hello->nonce);
    CHECK(join_write(fd, hello, sizeof *hello, ml_clock_now() + 1));
    CHECK(join_read(fd, &challenge, sizeof challenge, ml_clock_now() + 2));
    join_who_fill(launch, &answer->who);
    join_prove_client(&job, hello, challenge.nonce, &answer->who, answer->proof);
    CHECK(join_write(fd, answer, sizeof *answer, ml_clock_now() + 1));
    return fd;
}

static void replay(int port, const join_hello *hello, const join_answer *answer) {
    join_challenge challenge;
    int fd = knock(port);
    CHECK(join_write(fd, hello, sizeof *hello, ml_clock_now() + 1));
    CHECK(join_read(fd, &challenge, sizeof challenge, ml_clock_now() + 2));
    CHECK(join_write(fd, answer, sizeof *answer, ml_clock_now() + 1));
    CHECK(is_closed(fd));
}

TEST(fault, strangers_and_replays) {
    int port = comm_free_port(), silent[80], codes[COMM_MOST];
    comm_job job = {.ranks = 2, .fd = -1};
    ml_launch first = comm_launch_at(0, 2, port), second = comm_launch_at(1, 2, port);
    join_hello hello;
    join_answer answer;
    char garbage[4096];
    int nowhere = open("/dev/null", O_WRONLY);
    comm_start_rank(&job, &first, add_up, NULL, nowhere);
    close(nowhere);
    int fd = knock(port);
    memset(garbage, 'x', sizeof garbage);
    join_write(fd, garbage, sizeof garbage, ml_clock_now() + 1);
    CHECK(is_closed(fd));
    for (int i = 0; i < 80; i++) silent[i] = knock(port); /* more than are kept */
    CHECK(is_closed(record(port, &second, "a wrong secret", &hello, &answer)));
    int other = record(port, &second, "only the job knows", &hello, &answer);
    usleep(100000);
    CHECK(kill(job.pids[0], 0) == 0);
    join_close(&other);
    for (int i = 0; i < 80; i++) close(silent[i]);
    comm_finish(&job, 10, -1, codes);
    CHECK_EQ_INT(codes[0], 3);
}

/* What was recorded of a genuine handshake is refused, and the job continues. */
TEST(fault, replayed_handshake) {
    int port = comm_free_port();
    comm_job job = {.ranks = 3, .fd = -1};
    ml_launch launches[3];
    join_hello hello;
    join_answer answer;
    for (int i = 0; i < 3; i++) launches[i] = comm_launch_at(i, 3, port);
    comm_start_rank(&job, &launches[0], add_up, NULL, -1);
    int genuine = record(port, &launches[1], "only the job knows", &hello, &answer);
    replay(port, &hello, &answer);
    join_close(&genuine); /* rank 1 is out again */
    usleep(50000);
    replay(port, &hello, &answer);
    comm_start_rank(&job, &launches[2], add_up, NULL, -1);
    usleep(100000);
    replay(port, &hello, &answer);
    comm_start_rank(&job, &launches[1], add_up, NULL, -1);
    finish_well(&job);
}

/* ---- Mistakes ---------------------------------------------------------------------------------
 */

/* Rank 1's error when it opens by `launch` while rank 0 waits by its own. */
static void check_refused(const ml_launch *first, const ml_launch *second, const char *says) {
    comm_job job = {.ranks = 2, .fd = -1};
    int codes[COMM_MOST];
    char text[4096];
    FILE *errors = tmpfile();
    REQUIRE(errors);
    comm_set_timeout(1);
    comm_start_rank(&job, first, add_up, NULL, fileno(errors));
    comm_start_rank(&job, second, add_up, NULL, fileno(errors));
    comm_finish(&job, 30, -1, codes);
    comm_set_timeout(0);
    rewind(errors);
    text[fread(text, 1, sizeof text - 1, errors)] = 0;
    fclose(errors);
    CHECK_EQ_INT(codes[0], 3);
    CHECK_EQ_INT(codes[1], 3);
    EXPECT(strstr(text, says) &&
               strstr(text, "rank 0 cannot open: 1 of 2 ranks have not joined in time: rank 1"),
           "does not say \"%s\":\n%s", says, text);
}

TEST(comm, join_refused) {
    ml_launch first = comm_launch_at(0, 2, comm_free_port()), second = first;
    second.rank = 1;
    snprintf(second.secret, sizeof second.secret, "another secret");
    check_refused(&first, &second, "rank 1 cannot open: rank 1 finds no rank 0 of its job at 127");
    first = comm_launch_at(0, 2, comm_free_port());
    second = first;
    second.rank = 1;
    second.world = 4;
    check_refused(&first, &second, "it says it is rank 1 of 4, but this job has 2 ranks");
}

TEST(comm, join_mistakes) {
    ml_comm *comm;
    ml_launch launch = comm_launch_at(1, 2, comm_free_port());
    launch.address[0] = 0;
    CHECK_STATUS(ml_comm_open(&launch, &comm), ML_INVALID);
    CHECK_TEXT(ml_error_last()->text, "a test does not say where rank 0 is");
    launch.rank = 2;
    CHECK_STATUS(ml_comm_open(&launch, &comm), ML_INVALID);
    CHECK_TEXT(ml_error_last()->text, "rank 2 of 2 ranks (from a test)");
}

/* ---- The environment --------------------------------------------------------------------------
 */

/* Detects in a child with NAME=VALUE of `variables`; the child prints what it found. */
static void check_detected(const char *const *variables, const char *expected) {
    int ends[2], status;
    char text[1024];
    REQUIRE(pipe(ends) == 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        static const char *const others[] = {"RANK",         "WORLD_SIZE",      "MASTER_ADDR",
                                             "MASTER_PORT",  "SLURM_JOB_ID",    "SLURM_PROCID",
                                             "SLURM_NTASKS", "LOCAL_WORLD_SIZE"};
        ml_launch l;
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) unsetenv(others[i]);
        for (; *variables; variables++) putenv((char *)*variables);
        bool found = ml_launch_detect(&l);
        char *port = strrchr(l.address, ':');
        if (port && strncmp(l.source, "torch", 5)) *port = 0; /* follows from the job */
        dprintf(ends[1], "%d %s %d %d %d %s%s%s", found, l.source, l.rank, l.world, l.local_rank,
                l.address, l.several ? ", several hosts" : "", l.fixed_port ? ", fixed port" : "");
        _exit(0);
    }
    close(ends[1]);
    ssize_t size = read(ends[0], text, sizeof text - 1);
    text[size > 0 ? size : 0] = 0;
    close(ends[0]);
    waitpid(pid, &status, 0);
    CHECK_TEXT(text, expected);
}
#define ENVIRONMENT(...) ((const char *const[]){__VA_ARGS__, NULL})

TEST(comm, detects_launchers) {
    check_detected(ENVIRONMENT("HOME=/"), "0  0 1 0 ");
    check_detected(ENVIRONMENT("RANK=3", "WORLD_SIZE=8", "LOCAL_RANK=1", "MASTER_ADDR=node1",
                               "MASTER_PORT=29500"),
                   "1 torchrun 3 8 1 node1:29500, fixed port");
    check_detected(ENVIRONMENT("RANK=3", "WORLD_SIZE=8", "LOCAL_RANK=1", "MASTER_ADDR=node1",
                               "MASTER_PORT=29500", "TORCHELASTIC_USE_AGENT_STORE=False"),
                   "1 torchrun 3 8 1 node1:29500, fixed port");
    check_detected(ENVIRONMENT("RANK=3", "WORLD_SIZE=8", "LOCAL_RANK=1", "MASTER_ADDR=fe80::1",
                               "MASTER_PORT=29500", "TORCHELASTIC_USE_AGENT_STORE=True"),
                   "1 torchrun 3 8 1 [fe80::1]:29501");
    check_detected(ENVIRONMENT("RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=node1"), "0  0 1 0 ");
    check_detected(ENVIRONMENT("RANK=x", "WORLD_SIZE=2", "MASTER_ADDR=node1", "LOCAL_RANK=0"),
                   "1 torchrun -1 2 0 node1:29500");
    check_detected(ENVIRONMENT("SLURM_PROCID=5", "SLURM_NTASKS=16", "SLURM_LOCALID=1",
                               "SLURM_JOB_ID=77", "SLURM_STEP_ID=0", "SLURM_NNODES=4",
                               "SLURM_NODELIST=gpu[003-010,012],cpu1"),
                   "1 Slurm 5 16 1 gpu003, several hosts");
    check_detected(ENVIRONMENT("SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_LOCALID=1",
                               "SLURM_LAUNCH_NODE_IPADDR=10.0.0.7", "SLURM_NNODES=2"),
                   "1 Slurm 1 2 1 10.0.0.7, several hosts");
    check_detected(ENVIRONMENT("SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_LOCALID=1",
                               "SLURM_NNODES=1", "SLURM_NODELIST=gpu3"),
                   "1 Slurm 1 2 1 127.0.0.1");
    check_detected(ENVIRONMENT("SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_LOCALID=1",
                               "SLURM_NNODES=1", "SLURM_NODELIST=gpu3", "MASTER_PORT=999"),
                   "1 Slurm 1 2 1 127.0.0.1, fixed port");
    check_detected(ENVIRONMENT("SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_JOB_ID=77"),
                   "0  0 1 0 "); /* the batch script itself */
    check_detected(ENVIRONMENT("OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4",
                               "OMPI_COMM_WORLD_LOCAL_RANK=2", "OMPI_COMM_WORLD_LOCAL_SIZE=4"),
                   "1 Open MPI 2 4 2 127.0.0.1");
    check_detected(ENVIRONMENT("OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4",
                               "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=2",
                               "MASTER_ADDR=node1"),
                   "1 Open MPI 2 4 0 node1, several hosts");
    check_detected(ENVIRONMENT("RANK=3", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2",
                               "MASTER_ADDR=node1"),
                   "1 torchrun 3 8 1 node1:29500, several hosts");
}

/* Six digests of known texts. */
TEST(comm, digests) {
    static const struct {
        const char *text, *hex;
        int repeat;
    } known[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 1},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 1},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", 1},
        {"aaaaaaaaaa", "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", 100000}};
    uint8_t result[DIGEST_BYTES];
    char hex[2 * DIGEST_BYTES + 1];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        SHA2_CTX d;
        SHA256Init(&d);
        for (int k = 0; k < known[i].repeat; k++)
            SHA256Update(&d, (const uint8_t *)known[i].text, strlen(known[i].text));
        SHA256Final(result, &d);
        for (int k = 0; k < DIGEST_BYTES; k++) sprintf(hex + 2 * k, "%02x", result[k]);
        CHECK_TEXT(hex, known[i].hex);
    }
    keyed_digest k; /* RFC 4231, cases 2 and 6 */
    uint8_t key[131];
    keyed_start(&k, "Jefe", 4);
    keyed_add(&k, "what do ya want for nothing?", 28);
    keyed_end(&k, result);
    for (int i = 0; i < DIGEST_BYTES; i++) sprintf(hex + 2 * i, "%02x", result[i]);
    CHECK_TEXT(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    keyed_start(&k, key, sizeof key);
    keyed_add(&k, "Test Using Larger Than Block-Size Key - Hash Key First", 54);
    keyed_end(&k, result);
    for (int i = 0; i < DIGEST_BYTES; i++) sprintf(hex + 2 * i, "%02x", result[i]);
    CHECK_TEXT(hex, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(comm, secret_file) {
    char folder[] = "/tmp/mlua-secret-XXXXXX", path[256], a[65 + 256], b[65 + 256];
    ml_launch launch = {.world = 2};
    struct stat about;
    const char *before = getenv("XDG_CONFIG_HOME");
    char *saved = before ? strdup(before) : NULL;
    REQUIRE(mkdtemp(folder));
    setenv("XDG_CONFIG_HOME", folder, 1);
    CHECK_STATUS(comm_secret(&launch, a), ML_OK);
    CHECK_STATUS(comm_secret(&launch, b), ML_OK);
    CHECK_TEXT(b, a);
    CHECK_EQ_INT((int64_t)strlen(a), 64);
    snprintf(path, sizeof path, "%s/mlua/secret", folder);
    CHECK(stat(path, &about) == 0 && (about.st_mode & 0777) == 0600);
    chmod(path, 0644);
    CHECK_STATUS(comm_secret(&launch, b), ML_INVALID);
    unlink(path);
    snprintf(path, sizeof path, "%s/mlua", folder);
    CHECK(rmdir(path) == 0); /* nothing else is left there */
    rmdir(folder);
    if (saved)
        setenv("XDG_CONFIG_HOME", saved, 1);
    else
        unsetenv("XDG_CONFIG_HOME");
    free(saved);
}
