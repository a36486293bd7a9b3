#include "runtime/base/suggest.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

enum { LONGEST = 64 };

static int least(int a, int b) {
    return a < b ? a : b;
}

static int same(char a, char b) {
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

/* Optimal string alignment distance, row by row: rows[0] is the current one. */
static int distance(const char *a, const char *b) {
    int rows[3][LONGEST + 1];
    int length_a = (int)strlen(a), length_b = (int)strlen(b);
    if (length_a > LONGEST || length_b > LONGEST) return LONGEST;
    for (int j = 0; j <= length_b; j++) rows[0][j] = j;
    for (int i = 1; i <= length_a; i++) {
        memmove(rows[1], rows[0], 2 * sizeof rows[0]);
        rows[0][0] = i;
        for (int j = 1; j <= length_b; j++) {
            int cost = !same(a[i - 1], b[j - 1]);
            int edits = least(least(rows[1][j], rows[0][j - 1]) + 1, rows[1][j - 1] + cost);
            if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
                edits = least(edits, rows[2][j - 2] + 1);
            rows[0][j] = edits;
        }
    }
    return rows[0][length_b];
}

const char *ml_suggest(const char *word, const char *const *words, int count) {
    const char *nearest = NULL;
    int length = (int)strlen(word);
    int fewest = length <= 3 ? 1 : length <= 5 ? 2 : 3; /* more than that is another word */
    for (int i = 0; i < count; i++) {
        if (!words[i] || !*words[i]) continue;
        int edits = distance(word, words[i]);
        if (edits > fewest || edits >= length) continue;
        /* Of words equally near, the first that begins as the one written. */
        bool begins = same(words[i][0], word[0]);
        if (edits == fewest && nearest && (!begins || same(nearest[0], word[0]))) continue;
        nearest = words[i];
        fewest = edits;
    }
    return nearest;
}
