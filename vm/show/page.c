/* The page: report.html with the data in place of @DATA@. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "vm/embed.h"
#include "vm/show/show.h"

/* JSON inside a script element: no "<" of a name may end it. */
static int write_escaped(const char *text, size_t size, void *file) {
    for (size_t begin = 0; begin < size;) {
        const char *next = memchr(text + begin, '<', size - begin);
        size_t end = next ? (size_t)(next - text) : size;
        if (fwrite(text + begin, 1, end - begin, file) != end - begin) return -1;
        if (next && fputs("\\u003c", file) < 0) return -1;
        begin = end + (next != NULL);
    }
    return 0;
}

ml_status show_write_page(const char *path, const json_t *shown) {
    static const char place[] = "@DATA@";
    const ml_embedded *page = &ml_report_files[0];
    const char *data = strstr(page->data, place);
    size_t before = (size_t)(data - page->data), after = before + strlen(place);
    FILE *file = fopen(path, "wb");
    if (!file) return ml_fail(ML_IO, "cannot write %s: %s", path, strerror(errno));
    json_t *all = json_pack("{sO}", "shown", shown);
    int flags = JSON_COMPACT | JSON_REAL_PRECISION(7);
    bool good = all && fwrite(page->data, 1, before, file) == before &&
                json_dump_callback(all, write_escaped, file, flags) == 0 &&
                fwrite(page->data + after, 1, page->size - after, file) == page->size - after;
    json_decref(all);
    good = fclose(file) == 0 && good;
    return good ? ML_OK : ml_fail(ML_IO, "cannot write %s: %s", path, strerror(errno));
}
