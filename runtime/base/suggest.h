/* Did you mean: the known word nearest to one that the user wrote. */
#ifndef ML_SUGGEST_H
#define ML_SUGGEST_H

/* The word of words[0..count) with the fewest edits (insert, delete, replace, swap neighbours)
 * from `word`, upper and lower case alike, first of those that begin with its first letter; NULL
 * where none is near. Words may be NULL. */
const char *ml_suggest(const char *word, const char *const *words, int count);

#endif
