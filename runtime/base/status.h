/* Errors. A function that can fail either returns ml_status or raises.
 *
 * ml_raise formats one message, stores it in this thread's ml_error and unwinds to the innermost
 * ml_protect, which returns the status. Compiler passes, which allocate at every line, therefore
 * need no checks: their memory lives in arenas that the caller of ml_protect owns and frees.
 * Invariant: a function holds no file, thread, library handle or heap block (ml_alloc) across a
 * call that may raise, unless its own caller's ml_protect boundary releases it.
 * Nothing in runtime/ or codegen/ exits or aborts; assert is for our own bugs. */
#ifndef ML_STATUS_H
#define ML_STATUS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum {
    ML_OK,
    ML_INVALID,     /* the user's script or options ask for something impossible */
    ML_NO_MEMORY,   /* the host's memory is exhausted, or a GPU's */
    ML_TOO_LARGE,   /* a plan does not fit the device */
    ML_IO,          /* a file cannot be opened, read or written, or holds bad data */
    ML_COMPILE,     /* a generated kernel does not compile */
    ML_DEVICE,      /* a device or one of its libraries is missing or failed */
    ML_INTERRUPTED, /* SIGINT or SIGTERM asked to stop */
    ML_INTERNAL,    /* a bug of ours, found by the verifier */
} ml_status;

enum { ML_ERROR_OPERANDS = 4 };

typedef struct {
    ml_status status;
    char text[4096];  /* one sentence: what is wrong. More lines may follow after '\n' */
    char help[1024];  /* how to mend it; "" where there is nothing to say */
    uint32_t operands[ML_ERROR_OPERANDS]; /* node references in the graph that was being built */
    int operand_count;
} ml_error;

/* This thread's last error. Valid until the next one. */
ml_error *ml_error_last(void);

/* Store an error and return its status, for functions that return ml_status. */
ml_status ml_fail(ml_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Add a help line to the error that was just stored; returns its status. */
ml_status ml_help(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Return from a function that returns ml_status unless a call that it makes succeeded. */
#define ML_TRY(call)                                                                               \
    do {                                                                                           \
        ml_status tried_ = (call);                                                                 \
        if (tried_ != ML_OK) return tried_;                                                        \
    } while (0)

/* Store an error and unwind to the innermost ml_protect of this thread. */
_Noreturn void ml_raise(ml_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Unwind with the error that ml_fail stored. */
_Noreturn void ml_raise_last(void);
/* Raise if a call that returns ml_status failed. */
#define ML_CHECK(call) ((call) == ML_OK ? (void)0 : ml_raise_last())

/* Run body(argument); ML_OK, or the status of what it raised. Nests. */
ml_status ml_protect(void (*body)(void *), void *argument);

#endif
