/* `mlua show`: runs, checkpoints and safetensors files, as text, as JSON, as a page.
 *
 * What is shown is read into one JSON object first, from which the text and the page are made: so
 * --json has all that they say. Objects by "kind":
 *
 * - run: path, about (settings.json), progress {step, steps, tokens, seconds}, last {series:
 * value}, evaluation, series {name: curve}, events, checkpoints, profile, torn (the last line
 *   is not whole)
 * - checkpoint: path, record (of manifest.json), tensors, sums, verified
 * - safetensors: path, metadata, problem, tensors, sums
 *
 * A curve has step and value, equally long; of more than SHOW_POINTS steps it has as many bins:
 * each has its first step, the mean, and low and high. What is not finite is null. Files are only
 * read. Bytes are bytes, times are seconds, `started` is what settings.json says. */
#ifndef ML_SHOW_H
#define ML_SHOW_H

#include <jansson.h>

#include "runtime/base/memory.h"
#include "runtime/base/status.h"

enum { SHOW_POINTS = 2000 };

typedef struct {
    bool json, ascii; /* ascii: also where the locale is not UTF-8 */
    bool verify;      /* read every tensor of checkpoints */
    const char *html; /* the page to write, in place of the text; NULL: none */
} show_options;

/* The command: false, with the error stored, for bad input. Writes on standard output. */
bool show_paths(const show_options *options, int count, char **paths);

/* One run, checkpoint or file; NULL with an error. `verifies`: read every tensor of checkpoints and
 * compare its hash. */
json_t *show_read(const char *path, bool verifies);
json_t *show_read_run(const char *path, bool verifies);
json_t *show_read_checkpoint(const char *path, bool verifies); /* one that is not whole: NULL */
json_t *show_read_tensors(const char *path); /* a safetensors file, or a folder of them */
/* The checkpoints in a folder, the newest first: {path, step, bytes, whole, problem}. */
ml_status show_read_checkpoints(const char *folder, bool verifies, json_t *list);
/* Append the tensors of one file, and its metadata, to the lists of `shown`. */
ml_status show_add_tensors(json_t *shown, const char *path, const char *name);
void show_add_sums(json_t *shown);

/* A list of what is shown, as text on standard output; runs beside each other. */
ml_status show_print(const json_t *shown, bool ascii);

/* The page. */
ml_status show_write_page(const char *path, const json_t *shown);

/* A chart of one series of each run, `width` by `height` characters with its labels and title,
 * appended as `height` lines to `lines`. Of several runs each is drawn by a letter of its own. */
enum { SHOW_CHART_LINES = 8 };
typedef struct {
    char *line[SHOW_CHART_LINES];
} show_chart;
bool show_draw(ml_arena *arena, const json_t *runs, const char *series, const char *title,
               int width, bool ascii, show_chart *chart); /* false: no run has it */

/* RUN/profile.json, a trace -> profile {seconds, steps, kinds, kernels: [{name, kind, count,
 * seconds}]}: of the first rank's device, the longest first. */
enum { SHOW_KERNELS = 200 };
ml_status show_read_profile(const char *folder, json_t *run);

/* metrics.jsonl -> series, events, last, evaluation, torn of a run. */
ml_status show_read_metrics(const char *path, json_t *run);

bool show_exists(const char *folder, const char *name);
json_t *show_load_json(const char *folder, const char *name); /* an object; NULL with an error */
const char *show_string(const json_t *object, const char *key, const char *otherwise);
double show_number(const json_t *object, const char *key); /* NaN where it is none */

#endif
