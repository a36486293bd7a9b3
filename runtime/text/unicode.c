#include "runtime/text/unicode.h"

#include <pthread.h>
#include <utf8proc.h>

unsigned char unicode_classes[TEXT_CLASSES];

/* What Unicode 15.1 and 16.0 added, which old utf8proc lacks: the classes are those of 16.0, as in
 * Hugging Face's tokenizers 0.23 and tiktoken. */
enum {
    OTHER = TEXT_LETTER | TEXT_UPPER | TEXT_LOWER,
    UPPER = TEXT_LETTER | TEXT_UPPER,
    LOWER = TEXT_LETTER | TEXT_LOWER,
    MARK = TEXT_MARK | TEXT_UPPER | TEXT_LOWER,
    PUNCT = TEXT_PUNCT,
    SYMBOL = TEXT_SYMBOL,
    NUMBER = TEXT_NUMBER
};
static const struct {
    uint32_t first, last;
    unsigned char class;
} added[] = {
    {0x897, 0x897, MARK},       {0x1B4E, 0x1B4F, PUNCT},    {0x1B7F, 0x1B7F, PUNCT},
    {0x1C89, 0x1C89, UPPER},    {0x1C8A, 0x1C8A, LOWER},    {0x2427, 0x2429, SYMBOL},
    {0x2FFC, 0x2FFF, SYMBOL},   {0x31E4, 0x31E5, SYMBOL},   {0x31EF, 0x31EF, SYMBOL},
    {0xA7CB, 0xA7CC, UPPER},    {0xA7CD, 0xA7CD, LOWER},    {0xA7DA, 0xA7DA, UPPER},
    {0xA7DB, 0xA7DB, LOWER},    {0xA7DC, 0xA7DC, UPPER},    {0x105C0, 0x105F3, OTHER},
    {0x10D40, 0x10D49, NUMBER}, {0x10D4A, 0x10D4F, OTHER},  {0x10D50, 0x10D65, UPPER},
    {0x10D69, 0x10D6D, MARK},   {0x10D6E, 0x10D6E, PUNCT},  {0x10D6F, 0x10D6F, OTHER},
    {0x10D70, 0x10D85, LOWER},  {0x10D8E, 0x10D8F, SYMBOL}, {0x10EC2, 0x10EC4, OTHER},
    {0x10EFC, 0x10EFC, MARK},   {0x11380, 0x11389, OTHER},  {0x1138B, 0x1138B, OTHER},
    {0x1138E, 0x1138E, OTHER},  {0x11390, 0x113B5, OTHER},  {0x113B7, 0x113B7, OTHER},
    {0x113B8, 0x113C0, MARK},   {0x113C2, 0x113C2, MARK},   {0x113C5, 0x113C5, MARK},
    {0x113C7, 0x113CA, MARK},   {0x113CC, 0x113D0, MARK},   {0x113D1, 0x113D1, OTHER},
    {0x113D2, 0x113D2, MARK},   {0x113D3, 0x113D3, OTHER},  {0x113D4, 0x113D5, PUNCT},
    {0x113D7, 0x113D8, PUNCT},  {0x113E1, 0x113E2, MARK},   {0x116D0, 0x116E3, NUMBER},
    {0x11BC0, 0x11BE0, OTHER},  {0x11BE1, 0x11BE1, PUNCT},  {0x11BF0, 0x11BF9, NUMBER},
    {0x11F5A, 0x11F5A, MARK},   {0x13460, 0x143FA, OTHER},  {0x16100, 0x1611D, OTHER},
    {0x1611E, 0x1612F, MARK},   {0x16130, 0x16139, NUMBER}, {0x16D40, 0x16D6C, OTHER},
    {0x16D6D, 0x16D6F, PUNCT},  {0x16D70, 0x16D79, NUMBER}, {0x18CFF, 0x18CFF, OTHER},
    {0x1CC00, 0x1CCEF, SYMBOL}, {0x1CCF0, 0x1CCF9, NUMBER}, {0x1CD00, 0x1CEB3, SYMBOL},
    {0x1E5D0, 0x1E5ED, OTHER},  {0x1E5EE, 0x1E5EF, MARK},   {0x1E5F0, 0x1E5F0, OTHER},
    {0x1E5F1, 0x1E5FA, NUMBER}, {0x1E5FF, 0x1E5FF, PUNCT},  {0x1F8B2, 0x1F8BB, SYMBOL},
    {0x1F8C0, 0x1F8C1, SYMBOL}, {0x1FA89, 0x1FA89, SYMBOL}, {0x1FA8F, 0x1FA8F, SYMBOL},
    {0x1FABE, 0x1FABE, SYMBOL}, {0x1FAC6, 0x1FAC6, SYMBOL}, {0x1FADC, 0x1FADC, SYMBOL},
    {0x1FADF, 0x1FADF, SYMBOL}, {0x1FAE9, 0x1FAE9, SYMBOL}, {0x1FBCB, 0x1FBEF, SYMBOL},
    {0x2EBF0, 0x2EE5D, OTHER},
};

static bool is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

static unsigned class_of(utf8proc_category_t category) {
    switch (category) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT: return TEXT_LETTER | TEXT_UPPER;
    case UTF8PROC_CATEGORY_LL: return TEXT_LETTER | TEXT_LOWER;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: return TEXT_LETTER | TEXT_UPPER | TEXT_LOWER;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME: return TEXT_MARK | TEXT_UPPER | TEXT_LOWER;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: return TEXT_NUMBER;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO: return TEXT_PUNCT;
    case UTF8PROC_CATEGORY_SM:
    case UTF8PROC_CATEGORY_SC:
    case UTF8PROC_CATEGORY_SK:
    case UTF8PROC_CATEGORY_SO: return TEXT_SYMBOL;
    default: return 0;
    }
}

static void fill(void) {
    for (uint32_t c = 0; c < TEXT_CLASSES; c++)
        unicode_classes[c] = (unsigned char)(class_of(utf8proc_category((utf8proc_int32_t)c)) |
                                             (is_space(c) ? TEXT_SPACE : 0));
    for (size_t i = 0; i < sizeof added / sizeof *added; i++)
        for (uint32_t c = added[i].first; c <= added[i].last; c++)
            if (!unicode_classes[c]) unicode_classes[c] = added[i].class;
}

void unicode_init(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill);
}

int unicode_write(uint32_t c, char to[4]) {
    return (int)utf8proc_encode_char((utf8proc_int32_t)c, (utf8proc_uint8_t *)to);
}

/* Bytes that the character would have, and how many of them are there; 0: none begins so. */
static int begun(const unsigned char *at, const unsigned char *end, int *needed) {
    unsigned c = at[0], low = 0x80, high = 0xBF;
    *needed = c >= 0xC2 && c < 0xE0 ? 2 : c >= 0xE0 && c < 0xF0 ? 3 : c >= 0xF0 && c < 0xF5 ? 4 : 0;
    if (!*needed) return 0;
    if (c == 0xE0) low = 0xA0;
    if (c == 0xED) high = 0x9F;
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F;
    int there = 1;
    for (; there < *needed && at + there < end; there++, low = 0x80, high = 0xBF)
        if (at[there] < low || at[there] > high) break;
    return there;
}

int unicode_broken(const unsigned char *at, const unsigned char *end) {
    int needed, there = begun(at, end, &needed);
    return there ? there : 1;
}

bool unicode_begins(const unsigned char *at, const unsigned char *end) {
    int needed, there = begun(at, end, &needed);
    return there && there < needed && at + there == end;
}
