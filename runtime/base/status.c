#include "runtime/base/status.h"

#include <assert.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

typedef struct guard {
    jmp_buf jump;
    struct guard *outer;
} guard;

static _Thread_local guard *innermost;
static _Thread_local ml_error last;

ml_error *ml_error_last(void) {
    return &last;
}

/* Formats aside first: the arguments may point into the last error. */
static void store(ml_status status, const char *format, va_list arguments) {
    char text[sizeof last.text];
    vsnprintf(text, sizeof text, format, arguments);
    memcpy(last.text, text, strlen(text) + 1);
    last.status = status;
    last.help[0] = 0;
    last.operand_count = 0;
}

ml_status ml_fail(ml_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    store(status, format, arguments);
    va_end(arguments);
    return status;
}

ml_status ml_help(const char *format, ...) {
    char text[sizeof last.help];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    size_t used = strlen(last.help);
    snprintf(last.help + used, sizeof last.help - used, "%s%s", used ? "\n" : "", text);
    return last.status;
}

_Noreturn void ml_raise_last(void) {
    assert(last.status != ML_OK);
    if (!innermost) { /* a bug of ours: nothing could be cleaned up */
        fprintf(stderr, "mlua: raised outside of ml_protect: %s\n", last.text);
        __builtin_trap();
    }
    longjmp(innermost->jump, 1);
}

_Noreturn void ml_raise(ml_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    store(status, format, arguments);
    va_end(arguments);
    ml_raise_last();
}

ml_status ml_protect(void (*body)(void *), void *argument) {
    guard here;
    here.outer = innermost;
    innermost = &here;
    if (setjmp(here.jump)) {
        innermost = here.outer;
        return last.status;
    }
    body(argument);
    innermost = here.outer;
    return ML_OK;
}
