/* Errors: which op of the script, at which line, and what would mend it. */
#include <stdarg.h>
#include <stdio.h>

#include "runtime/increment/internal.h"

_Noreturn void increment_refuse(increment *inc, ml_ref n, const char *help, const char *format,
                                ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const ml_origin *origin = ml_graph_origin(inc->g, n);
    ml_error *error = ml_error_last();
    ml_fail(ML_INVALID, "%s:%d: %s", origin->file ? origin->file : "?", origin->line, text);
    if (help) ml_help("%s", help);
    error->operand_count = 0;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count && i < 2; i++)
        error->operands[error->operand_count++] = ml_graph_source(inc->g, n, i);
    ml_raise_last();
}
