#include "runtime/base/process.h"

#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST_CLEANERS = 8 };
static void (*cleaners[MOST_CLEANERS])(void);
static atomic_int cleaner_count;
static atomic_flag cleaned = ATOMIC_FLAG_INIT;
static atomic_bool abandoned;

/* ---- Signals --------------------------------------------------------------------------------- */

/* Whether what this process writes there has no reader any more. */
static bool unread(int fd) {
    struct pollfd p = {.fd = fd};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLERR | POLLHUP));
}

/* As without a handler where output is cut off (mlua run ... | head); else the write fails. */
static void on_pipe(int number) {
    if (!unread(STDOUT_FILENO) && !unread(STDERR_FILENO)) return;
    signal(number, SIG_DFL);
    raise(number);
}

void ml_process_begin(void) {
    struct sigaction before, action = {.sa_handler = on_pipe, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGXFSZ, SIG_IGN); /* a write beyond the limit of sizes fails with EFBIG instead */
    if (sigaction(SIGPIPE, NULL, &before) == 0 && before.sa_handler == SIG_DFL)
        sigaction(SIGPIPE, &action, NULL);
}

int ml_process_thread(pthread_t *thread, void *(*body)(void *), void *argument) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    sigset_t others, before;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    int error = pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* ---- The end --------------------------------------------------------------------------------- */

void ml_process_at_end(void (*clean)(void)) {
    int place = atomic_fetch_add(&cleaner_count, 1);
    if (place >= MOST_CLEANERS) return;
    cleaners[place] = clean;
    if (place == 0) atexit(ml_process_clean);
}

void ml_process_clean(void) {
    if (atomic_flag_test_and_set(&cleaned)) return;
    int count = atomic_load(&cleaner_count);
    for (int i = 0; i < count && i < MOST_CLEANERS; i++)
        if (cleaners[i]) cleaners[i]();
}

void ml_process_abandon(void) {
    atomic_store(&abandoned, true);
}

bool ml_process_abandoned(void) {
    return atomic_load(&abandoned);
}
