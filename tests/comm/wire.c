/* What passes between hosts once ranks have joined: somebody between them who changes it is found
 * out. And rank 0's port, where another program has it. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/wire_internal.h"
#include "tests/comm/support.h"
#include "tests/test.h"

/* ---- A relay between rank 1 and rank 0 --------------------------------------------------------
 */

typedef enum { PASS, CHANGE, CHANGE_BYTES, REPEAT, OMIT, SWAP, REFLECT, FORGE } mischief;
static const char *const mischiefs[] = {"pass", "change", "change bytes", "repeat",
                                        "omit", "swap",   "reflect",      "forge"};

/* As wire.c has them: a head with its proof; a failure, as an older mlua took it. */
typedef struct {
    uint32_t kind, sequence;
    uint64_t bytes;
    uint8_t proof[SEAL_BYTES];
} frame;
typedef struct {
    uint32_t kind, sequence;
    uint64_t bytes;
    uint8_t proof[SEAL_BYTES];
    int32_t rank, unused;
    char text[COMM_FAILURE_BYTES];
    uint8_t body_proof[SEAL_BYTES];
} forgery;
enum { WORDS = 0x6d6c7501, FAILURE = 0x6d6c7503, BEAT = 0x6d6c7505, HELD = 4096 };

typedef struct {
    int from, to;     /* sockets */
    size_t handshake; /* bytes that pass untouched */
    mischief what;    /* with what follows */
    bool done;
    char held[HELD];
    size_t used;
} flow;

static bool put(int fd, const void *bytes, size_t size) {
    return join_write(fd, bytes, size, ml_clock_now() + 2);
}

static void forge(flow *f) {
    forgery forged = {.kind = FAILURE, .bytes = sizeof forged - sizeof(frame) - SEAL_BYTES};
    snprintf(forged.text, sizeof forged.text, "rank 1 failed: forged words");
    put(f->to, &forged, sizeof forged);
}

/* One whole frame that carries words, with what was held back; false where more must come. */
static bool meddle(flow *f) {
    frame head;
    if (f->used < sizeof head) return false;
    memcpy(&head, f->held, sizeof head);
    size_t size = sizeof head + (head.bytes ? head.bytes + SEAL_BYTES : 0);
    if (f->used < size) return false;
    bool mine = !f->done && head.kind == WORDS && f->what != PASS;
    if (mine && f->what == SWAP) { /* with whatever comes next */
        if (f->used < size + sizeof head) return false;
        frame next;
        memcpy(&next, f->held + size, sizeof next);
        size_t both = size + sizeof next + (next.bytes ? next.bytes + SEAL_BYTES : 0);
        if (f->used < both) return false;
        put(f->to, f->held + size, both - size);
        put(f->to, f->held, size);
        size = both;
    } else if (!mine) {
        put(f->to, f->held, size);
    } else {
        if (f->what == CHANGE) f->held[4] ^= 1;
        if (f->what == CHANGE_BYTES) f->held[sizeof head] ^= 1;
        if (f->what == FORGE) forge(f);
        if (f->what == REFLECT) put(f->from, f->held, size);
        if (f->what != OMIT) put(f->to, f->held, size);
        if (f->what == REPEAT) put(f->to, f->held, size);
    }
    f->done |= mine;
    memmove(f->held, f->held + size, f->used - size);
    f->used -= size;
    return true;
}

/* False at the end. */
static bool relay_some(flow *f) {
    ssize_t count = recv(f->from, f->held + f->used, sizeof f->held - f->used, MSG_DONTWAIT);
    if (count <= 0) return count < 0;
    f->used += (size_t)count;
    size_t free_part = f->handshake < f->used ? f->handshake : f->used;
    put(f->to, f->held, free_part);
    memmove(f->held, f->held + free_part, f->used - free_part);
    f->handshake -= free_part;
    f->used -= free_part;
    while (meddle(f)) continue;
    return true;
}

/* In a process of its own, between the rank that connects here and rank 0. */
static _Noreturn void be_relay(int port, int to_port, mischief what, bool from_rank) {
    int listener = join_address("127.0.0.1", port, true, 0), near = -1, far = -1;
    while (near < 0 && join_wait(listener, POLLIN, ml_clock_now() + 20))
        near = accept(listener, NULL, NULL);
    for (int i = 0; i < 500 && far < 0; i++) {
        far = join_address("127.0.0.1", to_port, false, ml_clock_now() + 1);
        if (far < 0) usleep(10000);
    }
    static flow up, down;
    up = (flow){near, far, sizeof(join_hello) + sizeof(join_answer), from_rank ? what : PASS};
    down =
        (flow){far, near, sizeof(join_challenge) + sizeof(join_welcome), from_rank ? PASS : what};
    for (bool more = near >= 0 && far >= 0; more;) {
        struct pollfd p[] = {{.fd = near, .events = POLLIN}, {.fd = far, .events = POLLIN}};
        if (poll(p, 2, 20000) <= 0) break;
        more = (!p[0].revents || relay_some(&up)) && (!p[1].revents || relay_some(&down));
    }
    _exit(0);
}

static int agree_often(ml_comm *comm, void *argument) {
    (void)argument;
    for (int i = 0; i < 20; i++) {
        if (ml_comm_agree(comm, (uint64_t)i, "the plan") != ML_OK) return 1;
        if (i > 2) usleep(20000);
    }
    return 0;
}

/* Both ranks' output; codes are theirs. */
static void run_relayed(mischief what, bool from_rank, char *text, size_t size, int *codes) {
    comm_job job = {.ranks = 2, .fd = -1};
    int port = comm_free_port(), relay_port = comm_free_port();
    ml_launch first = comm_launch_at(0, 2, port), second = comm_launch_at(1, 2, relay_port);
    FILE *errors = tmpfile();
    REQUIRE(errors);
    memcpy(second.job, first.job, sizeof second.job);
    second.fixed_port = first.fixed_port = true;
    fflush(NULL);
    pid_t relay = fork();
    if (relay == 0) be_relay(relay_port, port, what, from_rank);
    comm_set_timeout(3);
    join_boot = "host a";
    comm_start_rank(&job, &first, agree_often, NULL, fileno(errors));
    join_boot = "host b";
    comm_start_rank(&job, &second, agree_often, NULL, fileno(errors));
    join_boot = NULL;
    comm_finish(&job, 30, -1, codes);
    comm_set_timeout(0);
    kill(relay, SIGKILL);
    waitpid(relay, NULL, 0);
    rewind(errors);
    text[fread(text, 1, size - 1, errors)] = 0;
    fclose(errors);
}

/* A rank that receives what is not authentic reports it, names the other end, and ends; nothing
 * else of it is believed. */
static void check_relayed(mischief what, bool from_rank) {
    static char text[8192];
    int codes[COMM_MOST], fooled = from_rank ? 0 : 1;
    bool back = what == REFLECT; /* it comes to the one who sent it */
    char says[160];
    run_relayed(what, from_rank, text, sizeof text, codes);
    snprintf(says, sizeof says, "has a connection that somebody interferes with: message ");
    char named[32];
    snprintf(named, sizeof named, "rank %d (pid ", back ? fooled : 1 - fooled);
    bool right = codes[0] && codes[1] && strstr(text, says) && strstr(text, named) &&
                 strstr(text, " is not authentic") && !strstr(text, "forged words");
    if (what == PASS) right = !codes[0] && !codes[1] && !*text;
    EXPECT(right, "%s, %s rank 0: exit codes %d and %d, and\n%s", mischiefs[what],
           from_rank ? "to" : "from", codes[0], codes[1], text);
}

TEST(fault, relay_to_rank_0) {
    for (mischief what = PASS; what <= FORGE; what++) check_relayed(what, true);
}
TEST(fault, relay_from_rank_0) {
    for (mischief what = PASS; what <= FORGE; what++) check_relayed(what, false);
}

/* Both directions of a connection, and two connections, have keys of their own. */
TEST(comm, seals) {
    seal a = {.key = {1}}, b = {.key = {2}}, end = a;
    uint8_t proof[SEAL_BYTES], next[SEAL_BYTES];
    seal_make(&a, "text", 4, proof);
    CHECK_EQ_INT((int64_t)a.number, 1);
    CHECK(seal_check(&end, 0, "text", 4, proof));
    CHECK(!seal_check(&end, 1, "text", 4, proof));
    CHECK(!seal_check(&end, 0, "test", 4, proof));
    CHECK(!seal_check(&end, 0, "text", 3, proof));
    CHECK(!seal_check(&b, 0, "text", 4, proof));
    seal_make(&a, "text", 4, next);
    CHECK(memcmp(proof, next, SEAL_BYTES) != 0);
    CHECK(seal_check(&end, 1, "text", 4, next));
    end.number++;
    CHECK(seal_check(&end, 0, "text", 4, next));
    proof[SEAL_BYTES - 1] ^= 1;
    CHECK(!seal_check(&end, 0, "text", 4, proof));
}

/* ---- Ports ------------------------------------------------------------------------------------
 */

static int meet_once(ml_comm *comm, void *argument) {
    (void)argument;
    return ml_comm_barrier(comm) == ML_OK ? 0 : 1;
}

/* Two ranks whose port this process has; what they say. */
static void run_with_port(bool fixed, int seconds, int port, char *text, size_t size, int *codes) {
    comm_job job = {.ranks = 2, .fd = -1};
    FILE *errors = tmpfile();
    REQUIRE(errors);
    comm_set_timeout(seconds);
    for (int i = 0; i < 2; i++) {
        ml_launch launch = comm_launch_at(i, 2, port);
        launch.fixed_port = fixed;
        comm_start_rank(&job, &launch, meet_once, NULL, fileno(errors));
    }
    comm_finish(&job, 30, -1, codes);
    comm_set_timeout(0);
    rewind(errors);
    text[fread(text, 1, size - 1, errors)] = 0;
    fclose(errors);
}

static void expect(const char *text, const char *words) {
    EXPECT(strstr(text, words), "there is no \"%s\" in\n%s", words, text);
}

TEST(comm, port_taken) {
    static char text[8192];
    int codes[COMM_MOST], port = comm_free_port();
    char says[256], holder[64];
    int listener = join_address("127.0.0.1", port, true, 0);
    REQUIRE(listener >= 0);
    char name[32];
    REQUIRE(prctl(PR_GET_NAME, name) == 0);
    snprintf(holder, sizeof holder, "%s (pid %d)", name, (int)getpid());
    run_with_port(true, 2, port, text, sizeof text, codes);
    snprintf(says, sizeof says,
             "rank 0 cannot open: rank 0 cannot listen at 127.0.0.1:%d: %s has this port", port,
             holder);
    expect(text, says);
    expect(text, "  help: end it, or set MASTER_PORT to another port for all ranks\n");
    snprintf(says, sizeof says, "rank 1 finds no rank 0 of its job at 127.0.0.1, port %d\n", port);
    expect(text, says);
    CHECK(codes[0] == 3 && codes[1] == 3);
    /* This process, which listens and is silent, keeps rank 1 for 5 s. */
    run_with_port(false, 20, port, text, sizeof text, codes);
    CHECK(!codes[0] && !codes[1]);
    snprintf(says, sizeof says, "mlua: %s has port %d: rank 0 waits at port %d\n", holder, port,
             port + 1);
    CHECK_TEXT(text, says);
    close(listener);
    run_with_port(true, 2, port, text, sizeof text, codes);
    CHECK(!codes[0] && !codes[1]);
    CHECK_TEXT(text, "");
}

TEST(comm, ports_all_taken) {
    static char text[8192];
    int codes[COMM_MOST], port = comm_free_port(), listeners[JOIN_PORTS];
    char says[160];
    for (int i = 0; i < JOIN_PORTS; i++)
        REQUIRE((listeners[i] = join_address("127.0.0.1", port + i, true, 0)) >= 0);
    run_with_port(false, 2, port, text, sizeof text, codes);
    snprintf(says, sizeof says,
             "cannot listen at 127.0.0.1: ports %d to %d are taken, the first by ", port,
             port + JOIN_PORTS - 1);
    expect(text, says);
    expect(text, "  help: set MASTER_PORT to a free port for all ranks\n");
    snprintf(says, sizeof says, "rank 1 finds no rank 0 of its job at 127.0.0.1, ports %d to %d\n",
             port, port + JOIN_PORTS - 1);
    expect(text, says);
    CHECK(codes[0] == 3 && codes[1] == 3);
    for (int i = 0; i < JOIN_PORTS; i++) close(listeners[i]);
}
