/* Channels between ranks: messages of every size, kept in order and whole, through rooms of every
 * size; what is said when the ends differ or one of them has ended; a device's ends. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/comm_internal.h"
#include "runtime/device/device.h"
#include "tests/comm/support.h"
#include "tests/test.h"

/* ---- Contents that both ends can work out -----------------------------------------------------
 */

static void fill(char *at, int64_t bytes, int from, int to, int message) {
    uint32_t value = (uint32_t)(from * 1000003 + to * 10007 + message * 101 + 7);
    for (int64_t i = 0; i < bytes; i++, value = value * 1664525 + 1013904223)
        at[i] = (char)(value >> 24);
}

static ml_status send_message(ml_channel *channel, char *memory, int64_t bytes, int message) {
    fill(memory, bytes, ml_channel_from(channel), ml_channel_to(channel), message);
    return ml_channel_send(channel, memory, bytes);
}

/* Receives between two bytes that must stay. */
static bool receive_message(ml_channel *channel, char *memory, char *expected, int64_t bytes,
                            int message) {
    memory[0] = memory[bytes + 1] = 77;
    fill(expected, bytes, ml_channel_from(channel), ml_channel_to(channel), message);
    return ml_channel_receive(channel, memory + 1, bytes) == ML_OK && memory[0] == 77 &&
           memory[bytes + 1] == 77 && memcmp(memory + 1, expected, (size_t)bytes) == 0;
}

/* ---- Every pair of ranks ----------------------------------------------------------------------
 */

enum { RANKS = 4, MOST_BYTES = 1500000 };
static const int64_t sizes[] = {1, 0, 3, 4096, 17, 100001, 64, MOST_BYTES, 5, 65536, 12345, 2};
enum { SIZES = sizeof sizes / sizeof *sizes };

static bool all_edges(ml_comm *comm, int64_t room, ml_channel *channels[RANKS][RANKS]) {
    bool good = true;
    for (int from = 0; from < RANKS; from++)
        for (int to = 0; to < RANKS; to++) {
            if (from == to) continue;
            good = good && ml_comm_channel(comm, from, to, 3, room, &channels[from][to]) == ML_OK;
            int me = ml_comm_rank(comm);
            good = good && (channels[from][to] != NULL) == (me == from || me == to);
        }
    return good;
}

/* In each round every rank sends to the one `distance` on; those before a break of the ring send
 * first, so that a room smaller than a message delays no rank for ever. */
static bool exchange(ml_comm *comm, ml_channel *channels[RANKS][RANKS], int64_t bytes,
                     int message) {
    int me = ml_comm_rank(comm);
    char *memory = malloc((size_t)bytes + 2), *expected = malloc((size_t)bytes + 1);
    bool good = memory && expected;
    for (int distance = 1; good && distance < RANKS; distance++) {
        ml_channel *to = channels[me][(me + distance) % RANKS];
        ml_channel *from = channels[(me + RANKS - distance) % RANKS][me];
        bool first = me < (distance == 2 ? 2 : 1);
        good = !first || send_message(to, memory, bytes, message) == ML_OK;
        good = good && receive_message(from, memory, expected, bytes, message);
        good = good && (first || send_message(to, memory, bytes, message) == ML_OK);
    }
    free(memory);
    free(expected);
    return good;
}

static int check_exchange(ml_comm *comm, void *argument) {
    ml_channel *channels[RANKS][RANKS];
    if (!all_edges(comm, *(int64_t *)argument, channels)) return 1;
    for (int i = 0; i < 3 * SIZES; i++)
        if (!exchange(comm, channels, sizes[i % SIZES], i)) return 2;
    return ml_comm_barrier(comm) == ML_OK ? 0 : 3;
}

TEST(comm_edges, every_pair_and_size) {
    int64_t rooms[] = {1 << 20, 4000, 100000};
    for (int i = 0; i < 3; i++) comm_run(RANKS, check_exchange, &rooms[i]);
}

static int check_one_byte_of_room(ml_comm *comm, void *argument) {
    (void)argument;
    ml_channel *channel;
    char memory[130], expected[130];
    if (ml_comm_channel(comm, 0, 1, 0, 1, &channel) != ML_OK) return 1;
    for (int i = 0; i < 128; i++) {
        bool good = ml_comm_rank(comm) == 0 ? send_message(channel, memory, i, i) == ML_OK
                                            : receive_message(channel, memory, expected, i, i);
        if (!good) return 2;
    }
    return 0;
}
TEST(comm_edges, one_byte_of_room) {
    comm_run(2, check_one_byte_of_room, NULL);
}

/* ---- Room -------------------------------------------------------------------------------------
 */

/* What fits is sent before any rank receives: both send before either receives; more messages than
 * a channel can have under way wait for the receiver, which finds all of them. */
static int check_room(ml_comm *comm, void *argument) {
    (void)argument;
    enum { MESSAGE = 10000, COUNT = 20, SMALL = 1000 };
    int me = ml_comm_rank(comm);
    char memory[MESSAGE + 2], expected[MESSAGE];
    ml_channel *there, *back, *channels[2];
    if (ml_comm_channel(comm, 0, 1, 0, MESSAGE * COUNT, &there) != ML_OK ||
        ml_comm_channel(comm, 1, 0, 0, MESSAGE * COUNT, &back) != ML_OK)
        return 1;
    channels[0] = me == 0 ? there : back, channels[1] = me == 0 ? back : there;
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < COUNT; i++)
            if (send_message(channels[0], memory, MESSAGE, i) != ML_OK) return 2;
        for (int i = 0; i < COUNT; i++)
            if (!receive_message(channels[1], memory, expected, MESSAGE, i)) return 3;
    }
    for (int i = 0; me == 0 && i < SMALL; i++)
        if (send_message(there, memory, i % 3, i) != ML_OK) return 4;
    if (me == 1) usleep(50000);
    for (int i = 0; me == 1 && i < SMALL; i++)
        if (!receive_message(there, memory, expected, i % 3, i)) return 5;
    return 0;
}
TEST(comm_edges, what_fits_is_sent) {
    comm_run(2, check_room, NULL);
}

static double processor_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

/* A sender whose room is full sleeps until there is room, as a receiver does without a message. */
static int check_sleep(ml_comm *comm, void *argument) {
    (void)argument;
    ml_channel *there, *back;
    char memory[102], expected[100];
    double began = ml_clock_now(), used = processor_seconds();
    if (ml_comm_channel(comm, 0, 1, 0, 150, &there) != ML_OK ||
        ml_comm_channel(comm, 1, 0, 0, 150, &back) != ML_OK)
        return 1;
    if (ml_comm_rank(comm) == 1) {
        usleep(500000);
        for (int i = 0; i < 2; i++)
            if (!receive_message(there, memory, expected, 100, i)) return 2;
        usleep(500000);
        return send_message(back, memory, 100, 0) == ML_OK ? 0 : 3;
    }
    for (int i = 0; i < 2; i++)
        if (send_message(there, memory, 100, i) != ML_OK) return 4;
    if (ml_clock_now() - began < 0.4) return 5;
    if (!receive_message(back, memory, expected, 100, 0)) return 6;
    return ml_clock_now() - began > 0.9 && processor_seconds() - used < 0.2 ? 0 : 7;
}
TEST(comm_edges, waiting_sleeps) {
    comm_run(2, check_sleep, NULL);
}

/* ---- The same channel, and mistakes
 * --------------------------------------------------------------
 */

/* The same pair and tag give the same channel, in a larger room where one is asked for. */
static int check_again(ml_comm *comm, void *argument) {
    (void)argument;
    int me = ml_comm_rank(comm);
    ml_channel *channel, *again, *other;
    char memory[50002], expected[50000];
    if (ml_comm_channel(comm, 0, 1, 0, 1000, &channel) != ML_OK ||
        ml_comm_channel(comm, 0, 1, 1, 1000, &other) != ML_OK || (me < 2 && other == channel))
        return 1;
    for (int i = 0; i < 3; i++) {
        if (ml_comm_channel(comm, 0, 1, 0, i == 1 ? 50000 : 500, &again) != ML_OK) return 2;
        if (again != channel) return 3;
        int64_t bytes = i == 0 ? 1000 : 50000; /* sent before the other end receives */
        if (me == 0 && send_message(channel, memory, bytes, i) != ML_OK) return 4;
        if (ml_comm_barrier(comm) != ML_OK) return 5;
        if (me == 1 && !receive_message(channel, memory, expected, bytes, i)) return 6;
    }
    return me == 2 && channel ? 7 : 0;
}
TEST(comm_edges, the_same_edge_again) {
    comm_run(3, check_again, NULL);
}

/* The receiver gives the old area's memory back while the sender leaves it. */
static int check_growing(ml_comm *comm, void *argument) {
    (void)argument;
    int me = ml_comm_rank(comm);
    ml_channel *channel;
    char memory[102], expected[100];
    for (int i = 0; i < 30000; i++) {
        if (ml_comm_channel(comm, 0, 1, 0, 1000 + i, &channel) != ML_OK) return 1;
        if (me == 0 && send_message(channel, memory, 100, i) != ML_OK) return 2;
        if (me == 1 && !receive_message(channel, memory, expected, 100, i)) return 3;
    }
    return 0;
}
TEST(comm_edges, an_edge_that_grows) {
    comm_run(2, check_growing, NULL);
}

static int check_many(ml_comm *comm, void *argument) {
    (void)argument;
    enum { EDGES = 256 };
    static ml_channel *channels[EDGES];
    int me = ml_comm_rank(comm);
    char memory[70], expected[70];
    for (int i = 0; i < EDGES; i++)
        if (ml_comm_channel(comm, i & 1, 1 - (i & 1), i, 64 << 20, &channels[i]) != ML_OK) return 1;
    for (int i = 0; i < EDGES; i++)
        if ((i & 1) == me && send_message(channels[i], memory, 64, i) != ML_OK) return 2;
    for (int i = EDGES - 1; i >= 0; i--)
        if ((i & 1) != me && !receive_message(channels[i], memory, expected, 64, i)) return 3;
    return 0;
}
/* 16 GB of room, of which next to nothing is touched. */
TEST(comm_edges, many_edges) {
    comm_run(2, check_many, NULL);
}

static int check_sizes_differ(ml_comm *comm, void *argument) {
    (void)argument;
    int me = ml_comm_rank(comm);
    char memory[100] = "";
    ml_channel *channel;
    if (ml_comm_channel(comm, 0, 1, 5, 1000, &channel) != ML_OK) return 1;
    ml_comm_note(comm, me == 0 ? "step 3, a.lua:1" : "step 3, b.lua:2");
    if (ml_comm_barrier(comm) != ML_OK) return 2;
    if (me == 0 && ml_channel_send(channel, memory, 100) != ML_OK) return 3;
    if (me == 1) {
        if (ml_channel_receive(channel, memory, 96) != ML_INVALID) return 4;
        if (strcmp(ml_error_last()->text,
                   "the ranks run different programs: rank 0 sends 100 bytes to rank 1 (tag 5; "
                   "step 3, a.lua:1), which expects 96 (step 3, b.lua:2)") != 0)
            return 5;
    }
    return ml_comm_barrier(comm) == ML_DEVICE ? 0 : 6; /* all know, and it stays failed */
}
TEST(comm_edges, sizes_that_differ) {
    comm_run(3, check_sizes_differ, NULL);
}

static int check_mistakes(ml_comm *comm, void *argument) {
    (void)argument;
    int me = ml_comm_rank(comm);
    char byte = 0;
    ml_channel *channel;
    if (ml_comm_channel(comm, 1, 1, 0, 10, &channel) != ML_INTERNAL ||
        ml_comm_channel(comm, 0, 2, 0, 10, &channel) != ML_INTERNAL ||
        ml_comm_channel(comm, 0, 1, 0, 0, &channel) != ML_INTERNAL)
        return 1;
    if (ml_comm_channel(comm, 0, 1, 0, 10, &channel) != ML_OK) return 2;
    if ((me ? ml_channel_send(channel, &byte, 1) : ml_channel_receive(channel, &byte, 1)) !=
        ML_INTERNAL)
        return 3;
    if (ml_comm_channel(comm, 0, 1, me, 10, &channel) != ML_INVALID) return 4;
    return strstr(ml_error_last()->text, "disagree on the channel from rank 0 to 1") ? 0 : 5;
}
TEST(comm_edges, mistakes) {
    comm_run(2, check_mistakes, NULL);
}

/* ---- Ends that have died ----------------------------------------------------------------------
 */

typedef enum { KILL, STOP, LEAVE } fault;
typedef struct {
    fault kind;
    bool sender; /* is at fault: rank 0; else the receiver, rank 2 */
} plan;
static const char *const says[] = {"died", "has been stopped or frozen",
                                   "has ended while others wait for it"};
enum { CHAIN = 3, BYTES = 50000, FAULT_STEP = 5 };

/* Messages go from rank 0 over 1 to 2. */
static ml_status chain_step(ml_comm *comm, ml_channel *in, ml_channel *out, char *memory) {
    (void)comm;
    ml_status status = in ? ml_channel_receive(in, memory, BYTES) : ML_OK;
    return status == ML_OK && out ? ml_channel_send(out, memory, BYTES) : status;
}

static int suffer_in_chain(ml_comm *comm, void *argument) {
    const plan *p = argument;
    int me = ml_comm_rank(comm), victim = p->sender ? 0 : CHAIN - 1;
    ml_channel *in = NULL, *out = NULL, *channel;
    static char memory[BYTES];
    for (int r = 0; r < CHAIN - 1; r++) {
        if (ml_comm_channel(comm, r, r + 1, 9, BYTES, &channel) != ML_OK) return 3;
        if (me == r) out = channel;
        if (me == r + 1) in = channel;
    }
    ml_status status = ML_OK;
    for (int step = 1; status == ML_OK && step < 100000; step++) {
        char note[64];
        snprintf(note, sizeof note, "step %d, stage %d gpt.lua:7", step, me);
        ml_comm_note(comm, note);
        if (step == FAULT_STEP && me == victim && p->kind == LEAVE) return 0;
        if (step == FAULT_STEP && me == victim) raise(p->kind == KILL ? SIGKILL : SIGSTOP);
        status = chain_step(comm, in, out, memory);
    }
    ml_error error = *ml_error_last();
    if (ml_comm_fail(comm, error.text))
        fprintf(stderr, "reported by rank %d: %s\n", me, error.text);
    *ml_error_last() = (ml_error){0};
    return ml_comm_peer_failed() ? ML_EXIT_PEER : 1;
}

static void check_message(const plan *p, int pid, const int *codes, FILE *errors) {
    char text[8192], named[128], waits[128];
    int victim = p->sender ? 0 : CHAIN - 1;
    rewind(errors);
    text[fread(text, 1, sizeof text - 1, errors)] = 0;
    fclose(errors);
    snprintf(named, sizeof named, "rank %d (pid %d) %s", victim, pid, says[p->kind]);
    snprintf(waits, sizeof waits, "rank 1 waits in a %s of %d bytes %s rank %d (tag 9): step ",
             p->sender ? "receive" : "send", BYTES, p->sender ? "from" : "to", victim);
    EXPECT(strstr(text, named) && strstr(text, waits) &&
               strstr(text, "last seen in: step 5, stage"),
           "expected \"%s\" and \"%s\" in\n%s", named, waits, text);
    for (int i = 0; i < CHAIN; i++)
        if (i != victim) CHECK_EQ_INT(codes[i], ML_EXIT_PEER);
}

/* The sender of one job and the receiver of another, side by side, for they mostly wait. */
static void both_ends(fault kind) {
    comm_job jobs[2];
    plan plans[2] = {{kind, true}, {kind, false}};
    FILE *errors[2];
    comm_set_timeout(2);
    for (int i = 0; i < 2; i++) {
        errors[i] = tmpfile();
        REQUIRE(errors[i]);
        comm_start(&jobs[i], CHAIN, suffer_in_chain, &plans[i], fileno(errors[i]));
    }
    for (int i = 0; i < 2; i++) {
        int codes[COMM_MOST], victim = plans[i].sender ? 0 : CHAIN - 1, pid = jobs[i].pids[victim];
        comm_finish(&jobs[i], 20, victim, codes);
        check_message(&plans[i], pid, codes, errors[i]);
    }
    comm_set_timeout(0);
}

TEST(comm_edges, killed_ends) {
    both_ends(KILL);
}
TEST(comm_edges, stopped_ends) {
    both_ends(STOP);
}
TEST(comm_edges, ends_that_leave) {
    both_ends(LEAVE);
}

/* What was sent before the sender left is received. */
static int check_last_words(ml_comm *comm, void *argument) {
    (void)argument;
    char memory[102], expected[100];
    ml_channel *channel;
    if (ml_comm_channel(comm, 0, 1, 0, 1000, &channel) != ML_OK) return 1;
    if (ml_comm_rank(comm) == 0) return send_message(channel, memory, 100, 1) == ML_OK ? 0 : 2;
    usleep(300000);
    return receive_message(channel, memory, expected, 100, 1) ? 0 : 3;
}
TEST(comm_edges, last_words) {
    comm_run(2, check_last_words, NULL);
}

/* ---- Devices ----------------------------------------------------------------------------------
 */

static int check_device(ml_comm *comm, void *argument) {
    (void)argument;
    enum { LENGTH = 3001 };
    ml_device *device;
    ml_channel *channels[2];
    char memory[LENGTH], expected[LENGTH];
    if (ml_device_open("cpu", 0, &device) != ML_OK) return 1;
    const ml_device_ops *ops = device->ops;
    for (int tag = 0; tag < 2; tag++)
        if (ml_comm_channel(comm, 0, 1, tag, LENGTH, &channels[tag]) != ML_OK) return 2;
    bool good = true;
    for (int i = 0; good && i < 20; i++) {
        ml_channel *channel = channels[i % 2];
        if (ml_comm_rank(comm) == 0) {
            fill(memory, LENGTH, 0, 1, i);
            good = ops->send(device, channel, memory, LENGTH) == ML_OK &&
                   ops->wait_sent(device, channel, memory) == ML_OK;
        } else {
            fill(expected, LENGTH, 0, 1, i);
            good = ops->expect(device, channel, memory, LENGTH) == ML_OK &&
                   ops->expect(device, channel, memory, LENGTH) == ML_INTERNAL &&
                   ops->arrive(device, channel, memory) == ML_OK &&
                   memcmp(memory, expected, LENGTH) == 0 &&
                   ops->arrive(device, channel, memory) == ML_INTERNAL;
        }
    }
    ml_device_close(device);
    return good ? 0 : 3;
}
TEST(comm_edges, of_a_device) {
    comm_run(2, check_device, NULL);
}
