/* This process among others: its threads, the signals that reach it, and how it ends.
 *
 * However a script ended, what the process created outside itself (temporary folders) is removed
 * and what it printed is flushed. Then it returns from main, so that libraries' destructors run;
 * but where a thread stays inside a library, as one that connects to ranks that have ended, it ends
 * without them: the thread would go on while they take the library apart, and crash. */
#ifndef ML_PROCESS_H
#define ML_PROCESS_H

#include <pthread.h>
#include <stdbool.h>

/* Once, early. SIGCHLD, which the parent may have ignored, reports children
 * again. SIGPIPE ends the process only where no reader of its output is left: a connection that a
 * library writes to and whose other end has died is an error of that call alone. */
void ml_process_begin(void);

/* A thread that takes no signal but those of its own faults; 0, or an error number. Threads that
 * it starts, as a library's, inherit that. */
int ml_process_thread(pthread_t *thread, void *(*body)(void *), void *argument);

/* Call `clean` once when the process ends, in any way but by a signal; at most 8 of them. */
void ml_process_at_end(void (*clean)(void));
/* Call them now, from any thread: before _exit. */
void ml_process_clean(void);

/* A thread stays inside a library's call until the process ends. */
void ml_process_abandon(void);
bool ml_process_abandoned(void);

#endif
