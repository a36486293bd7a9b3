/* `mlua run -n N`: the ranks of one host, from start to end. The launcher has one thread, sleeps in
 * poll, and computes nothing. Whatever happens to it or to a rank, no process stays: ranks die with
 * it (PR_SET_PDEATHSIG), and what ranks have started becomes its child when they die, and is ended.
 * Processes that it did not start can be its children too: a shell that started them was replaced
 * by it (sh -c 'sleep 300 & exec mlua run ... -n 2'). These are left alone: a process of its own,
 * which has no such children, is the launcher then. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/pool.h"
#include "runtime/comm/join_internal.h"

enum {
    LINE_BYTES = 8192,
    POLL_MS = 200,
    EXIT_FAILED = 1,
    SIGNALS_TO_KILL = 3,
    MOST_SIGNALLED = 256
};
/* Seconds after a failure: ranks end by themselves in comm_stale_limit or GRACE, the less. */
static const double GRACE = 8, TERM_AFTER = 2, KILL_AFTER = 6, ALONE = 3;
static const double ORPHANS = 2; /* to end by themselves, as a compiler with its files does */

typedef struct {
    pid_t pid;  /* 0: has ended */
    int output; /* the read end of its stderr; -1 */
    size_t used;
    char line[LINE_BYTES];
} child;

typedef struct {
    ml_comm_options options;
    int ranks, running, fd, signals;
    pid_t parent; /* with which this process ends, where it runs for another one; else 0 */
    comm_segment *segment;
    size_t mapped;
    child *children;
    struct pollfd *polled; /* [ranks + 1] */
    sigset_t before;
    int exit_code;    /* of the first rank that failed */
    bool peers_ended; /* some ended with ML_EXIT_PEER */
    int interrupts;
    double failed_at; /* 0: not */
    bool terminated, killed;
    char address[64],
        secret[65]; /* where MLUA_HOSTS forbids ranks to share this one's memory; "" */
} launcher;

/* ---- Output ---------------------------------------------------------------------------------- */

static void write_all(const char *text, size_t size) {
    while (size) {
        ssize_t written = write(STDERR_FILENO, text, size);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return;
        text += written;
        size -= (size_t)written;
    }
}

/* Rank 0 may be in the middle of a progress bar, which it draws again. */
static const char *over_the_bar(void) {
    return isatty(STDERR_FILENO) ? "\r\033[K" : "";
}

static void put_line(int rank, const char *line, size_t size) {
    char text[LINE_BYTES + 32];
    int head = snprintf(text, sizeof text, "%s[rank %d] ", over_the_bar(), rank);
    memcpy(text + head, line, size);
    if (!size || line[size - 1] != '\n') text[head + (int)size++] = '\n';
    write_all(text, (size_t)head + size);
}

/* Pass on whole lines, and very long ones in pieces; false at the end of the output. */
static bool pass_on(child *c, int rank) {
    for (;;) {
        ssize_t count = read(c->output, c->line + c->used, LINE_BYTES - c->used);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno == EAGAIN;
        size_t from = 0;
        c->used += (size_t)count;
        for (char *end; (end = memchr(c->line + from, '\n', c->used - from));) {
            size_t to = (size_t)(end - c->line) + 1;
            put_line(rank, c->line + from, to - from);
            from = to;
        }
        if (c->used - from == LINE_BYTES || (count == 0 && c->used > from)) {
            put_line(rank, c->line + from, c->used - from);
            from = c->used;
        }
        memmove(c->line, c->line + from, c->used - from);
        c->used -= from;
        if (count == 0) return false;
    }
}

static void close_output(child *c, int rank) {
    if (c->output < 0) return;
    if (pass_on(c, rank) && c->used) put_line(rank, c->line, c->used);
    close(c->output);
    c->output = -1;
    c->used = 0;
}

/* ---- Starting -------------------------------------------------------------------------------- */

static void set_number(const char *name, int value) {
    char text[32];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static _Noreturn void become_rank(const launcher *l, int rank, int errors, pid_t parent,
                                  char **argv) {
    int nothing = open("/dev/null", O_RDWR);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(EXIT_FAILED);
    sigprocmask(SIG_SETMASK, &l->before, NULL);
    if (rank > 0 && (dup2(nothing, STDIN_FILENO) < 0 || dup2(nothing, STDOUT_FILENO) < 0 ||
                     dup2(errors, STDERR_FILENO) < 0))
        _exit(EXIT_FAILED);
    if (nothing > STDERR_FILENO) close(nothing);
    set_number("MLUA_RANK", rank);
    set_number("MLUA_LOCAL_RANK", rank);
    set_number("MLUA_WORLD", l->ranks);
    if (*l->address) {
        setenv("MLUA_ADDRESS", l->address, 1);
        setenv("MLUA_JOB", l->secret, 1);
    } else {
        fcntl(l->fd, F_SETFD, 0);
        set_number("MLUA_SEGMENT", l->fd);
    }
    const char *threads = getenv("MLUA_THREADS");
    int cores = ml_cpu_count() / l->ranks;
    if (!threads || !*threads) set_number("MLUA_THREADS", cores > 1 ? cores : 1);
    execv("/proc/self/exe", argv);
    dprintf(STDERR_FILENO, "mlua: cannot start rank %d: %s\n", rank, strerror(errno));
    _exit(EXIT_FAILED);
}

static ml_status start_rank(launcher *l, int rank, char **argv) {
    int ends[2] = {-1, -1};
    child *c = &l->children[rank];
    if (rank > 0 && pipe2(ends, O_CLOEXEC) != 0)
        return ml_fail(ML_IO, "cannot start rank %d: %s", rank, strerror(errno));
    if (rank > 0) fcntl(ends[0], F_SETFL, O_NONBLOCK);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) become_rank(l, rank, ends[1], parent, argv);
    if (rank > 0) close(ends[1]);
    c->output = ends[0];
    if (pid < 0) return ml_fail(ML_IO, "cannot start rank %d: %s", rank, strerror(errno));
    c->pid = pid;
    atomic_store(&l->segment->ranks[rank].pid, (int32_t)pid);
    l->running++;
    return ML_OK;
}

/* Ranks that take themselves for those of several hosts meet as these do, at rank 0's. */
static void choose_address(launcher *l) {
    enum { FIRST_PORT = 40000, PORTS = 20000 };
    uint16_t random;
    if (l->options.hosts <= 1 || l->ranks <= 1) return;
    join_random(&random, sizeof random);
    snprintf(l->address, sizeof l->address, "127.0.0.1:%d", FIRST_PORT + random % PORTS);
    join_random_hex(l->secret, sizeof l->secret - 1);
}

static void watch_signals(sigset_t *watched) {
    sigemptyset(watched);
    sigaddset(watched, SIGCHLD);
    sigaddset(watched, SIGINT);
    sigaddset(watched, SIGTERM);
    sigaddset(watched, SIGHUP);
    sigaddset(watched, SIGUSR1);
}

static ml_status start(launcher *l, char **argv) {
    sigset_t watched;
    watch_signals(&watched);
    sigprocmask(SIG_BLOCK, &watched, &l->before);
    l->signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
    if (l->signals < 0) return ml_fail(ML_IO, "cannot watch signals: %s", strerror(errno));
    l->fd = comm_segment_new(l->ranks);
    if (l->fd < 0) return ml_error_last()->status;
    ml_status status = comm_segment_map(l->fd, &l->segment, &l->mapped);
    if (status != ML_OK) return status;
    atomic_store(&l->segment->launched, 1);
    choose_address(l);
    l->children = ml_alloc((size_t)l->ranks * sizeof *l->children);
    l->polled = ml_alloc((size_t)(l->ranks + 1) * sizeof *l->polled);
    if (!l->children || !l->polled)
        return ml_fail(ML_NO_MEMORY, "no memory to start %d ranks", l->ranks);
    for (int i = 0; i < l->ranks; i++) l->children[i].output = -1;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fflush(NULL);
    for (int i = 0; i < l->ranks; i++)
        if ((status = start_rank(l, i, argv)) != ML_OK) return status;
    return ML_OK;
}

/* ---- Ending ---------------------------------------------------------------------------------- */

static void signal_ranks(launcher *l, int number) {
    for (int i = 0; l->children && i < l->ranks; i++)
        if (l->children[i].pid) kill(l->children[i].pid, number);
}

/* It has reported why: what it ends with is the job's code, however long it takes to end. */
static bool failed_itself(const launcher *l, int rank) {
    return atomic_load(&l->segment->failure_own) &&
           (int)atomic_load(&l->segment->failed) - 1 == rank;
}

static void rank_ended(launcher *l, int rank, int status) {
    comm_record *record = &l->segment->ranks[rank];
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    char why[128];
    l->children[rank].pid = 0;
    l->running--;
    close_output(&l->children[rank], rank);
    if (code == 0 || code == ML_EXIT_REQUEUE || code == ML_EXIT_UNSAVED) { /* none failed */
        atomic_store(&record->state, COMM_DONE);
        if (!l->exit_code) l->exit_code = code;
        return;
    }
    if (WIFEXITED(status))
        snprintf(why, sizeof why, "ended with exit code %d", code);
    else
        snprintf(why, sizeof why, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    if (code == ML_EXIT_PEER)
        l->peers_ended = true;
    else if (!l->exit_code && ((!l->terminated && !l->killed) || failed_itself(l, rank)))
        l->exit_code = WIFEXITED(status) || !failed_itself(l, rank) ? code : EXIT_FAILED;
    comm_accuse(l->segment, rank, why);
    atomic_store(&record->state, COMM_DEAD);
}

static void reap(launcher *l) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < l->ranks; i++)
            if (l->children[i].pid == pid) rank_ended(l, i, status);
}

/* A terminal sends its signals to the ranks too; those of other processes are passed on. */
static void take_signals(launcher *l) {
    if (l->parent && getppid() != l->parent) {
        l->killed = true;
        signal_ranks(l, SIGKILL);
    }
    struct signalfd_siginfo signal;
    while (read(l->signals, &signal, sizeof signal) == (ssize_t)sizeof signal) {
        if (signal.ssi_signo == SIGCHLD) continue;
        if (signal.ssi_code <= 0) signal_ranks(l, (int)signal.ssi_signo);
        if (++l->interrupts >= SIGNALS_TO_KILL) {
            l->killed = true;
            signal_ranks(l, SIGKILL);
        }
    }
}

/* After a failure: ranks get time to end by themselves, then none. The one at fault, which may be
 * stopped, is not waited for once it is the last. */
static void press(launcher *l) {
    if (!l->failed_at) {
        if (atomic_load(&l->segment->failed)) l->failed_at = ml_clock_now();
        return;
    }
    double since = ml_clock_now() - l->failed_at;
    double grace =
        comm_stale_limit(l->options.timeout) < GRACE ? comm_stale_limit(l->options.timeout) : GRACE;
    int fault = (int)atomic_load(&l->segment->failed) - 1;
    bool alone = l->running == 1 && fault >= 0 && l->children[fault].pid && since > ALONE &&
                 !failed_itself(l, fault);
    if (since > grace + TERM_AFTER && !l->terminated) {
        l->terminated = true;
        signal_ranks(l, SIGTERM);
    }
    if ((since > grace + KILL_AFTER || alone) && !l->killed) {
        l->killed = true;
        signal_ranks(l, SIGKILL);
    }
}

static void run(launcher *l) {
    while (l->running) {
        int count = 0;
        l->polled[count++] = (struct pollfd){.fd = l->signals, .events = POLLIN};
        for (int i = 0; i < l->ranks; i++)
            if (l->children[i].output >= 0)
                l->polled[count++] = (struct pollfd){.fd = l->children[i].output, .events = POLLIN};
        poll(l->polled, (nfds_t)count, POLL_MS);
        for (int i = 0, at = 1; i < l->ranks; i++) {
            child *c = &l->children[i];
            if (c->output < 0) continue;
            if (l->polled[at++].revents && !pass_on(c, i)) close_output(c, i);
        }
        take_signals(l);
        reap(l);
        press(l);
    }
}

/* SIGTERM, once, to each child of this process, or SIGKILL. How many there are, as far as one look
 * shows. */
static int signal_orphans(bool killing, pid_t signalled[MOST_SIGNALLED]) {
    char path[64];
    int count = 0, pid;
    snprintf(path, sizeof path, "/proc/self/task/%ld/children", (long)syscall(SYS_gettid));
    FILE *file = fopen(path, "re");
    for (; file && fscanf(file, "%d", &pid) == 1; count++) {
        int i = 0;
        while (i < MOST_SIGNALLED && signalled[i] && signalled[i] != pid) i++;
        bool known = i < MOST_SIGNALLED && signalled[i] == pid;
        if (i < MOST_SIGNALLED) signalled[i] = pid;
        if (killing || !known) kill(pid, killing ? SIGKILL : SIGTERM);
    }
    if (file) fclose(file);
    return count;
}

/* What the ranks started and left behind has become this process's child: end it. */
static void end_orphans(void) {
    pid_t signalled[MOST_SIGNALLED] = {0};
    double began = ml_clock_now(), since = 0;
    while (signal_orphans(since > ORPHANS, signalled) && since < 2 * ORPHANS) {
        while (waitpid(-1, NULL, WNOHANG) > 0) continue;
        usleep(5000);
        since = ml_clock_now() - began;
    }
}

/* What rank 0 reported needs no more words, and none are for a reader who has left (mlua run ... |
 * head). */
static void report(launcher *l) {
    char text[COMM_FAILURE_BYTES];
    int rank = comm_failure_get(l->segment, text);
    bool own = atomic_load(&l->segment->failure_own);
    bool cut_off = l->exit_code == 128 + SIGPIPE;
    if (rank < 0 || l->interrupts || (rank == 0 && (own || cut_off))) return;
    if (own) /* that rank has reported why */
        fprintf(stderr, "%smlua: rank %d failed; the other ranks were stopped\n", over_the_bar(),
                rank);
    else
        fprintf(stderr, "%smlua: %s; the other ranks were stopped\n", over_the_bar(), text);
}

static void clean_up(launcher *l) {
    end_orphans();
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    for (int i = 0; l->children && i < l->ranks; i++) close_output(&l->children[i], i);
    if (l->segment) munmap(l->segment, l->mapped);
    if (l->fd >= 0) close(l->fd);
    if (l->signals >= 0) close(l->signals);
    sigprocmask(SIG_SETMASK, &l->before, NULL);
    ml_free(l->children);
    ml_free(l->polled);
}

static int launch(int ranks, const ml_comm_options *options, char **argv, pid_t parent) {
    launcher l = {.ranks = ranks, .options = *options, .fd = -1, .signals = -1, .parent = parent};
    ml_status status = start(&l, argv);
    if (status != ML_OK) {
        fprintf(stderr, "mlua: %s\n", ml_error_last()->text);
        signal_ranks(&l, SIGKILL);
        l.exit_code = EXIT_FAILED;
    }
    run(&l);
    if (status == ML_OK && (l.exit_code || l.peers_ended || l.killed)) report(&l);
    clean_up(&l);
    if (l.exit_code) return l.exit_code;
    if (l.interrupts >= SIGNALS_TO_KILL) return 128 + SIGINT;
    return l.peers_ended || l.killed ? ML_EXIT_PEER : 0;
}

/* ---- Beside other children ------------------------------------------------------------------- */

static bool has_children(void) {
    siginfo_t any;
    return waitid(P_ALL, 0, &any, WEXITED | WNOHANG | WNOWAIT) == 0;
}

/* Passes on what others send to this process, until the launcher ends. */
static int follow(pid_t pid, const sigset_t *watched) {
    const struct timespec second = {.tv_sec = 1};
    int status;
    for (pid_t ended; (ended = waitpid(pid, &status, WNOHANG)) != pid;) {
        siginfo_t signal;
        if (ended < 0 && errno != EINTR) return EXIT_FAILED;
        int number = sigtimedwait(watched, &signal, &second);
        if (number > 0 && number != SIGCHLD && signal.si_code <= 0) kill(pid, number);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int launch_beside(int ranks, const ml_comm_options *options, char **argv) {
    sigset_t watched, before;
    watch_signals(&watched);
    sigprocmask(SIG_BLOCK, &watched, &before);
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        sigprocmask(SIG_SETMASK, &before, NULL);
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* ranks and all that they started end then */
        int code = launch(ranks, options, argv, parent);
        fflush(NULL);
        _exit(code);
    }
    int code = EXIT_FAILED;
    if (pid > 0)
        code = follow(pid, &watched);
    else
        fprintf(stderr, "mlua: cannot start %d ranks: %s\n", ranks, strerror(errno));
    sigprocmask(SIG_SETMASK, &before, NULL);
    return code;
}

int ml_launch_local(int ranks, const ml_comm_options *options, char **argv) {
    return has_children() ? launch_beside(ranks, options, argv) : launch(ranks, options, argv, 0);
}
