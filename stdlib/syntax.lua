-- Hints for syntax errors: what a text that Lua refuses was probably meant to say.
--
-- A text is a list of tokens (core.tokens). A rule looks at those around the one at which Lua gave up, and gives a hint where
-- it knows the mistake. Some tokens are on the line more than once: rules are tried for each.
local core = require "mlua.core"

-- Of the problem: {kind, text, line, first, last}, the whole text, where its lines begin, Lua's message.
local tokens, text, starts, message

local function kind(i) return tokens[i] and tokens[i].kind or "EOF" end
local function line(i) return tokens[math.max(i, 1)].line end
local function word(i) return tokens[i] and tokens[i].text end
local function says(part) return message:find(part, 1, true) ~= nil end
local function set(words)
  local result = {}
  for each in words:gmatch "%S+" do result[each] = true end
  return result
end

-- Token i, which nothing separates from the next.
local function joined(i, first, second) return kind(i) == first and kind(i + 1) == second and tokens[i].last + 1 == tokens[i + 1].first end

local function is_first(i) return kind(i - 1) == "EOF" or line(i - 1) < line(i) end

local function first_on_line(i)
  while i > 1 and not is_first(i) do i = i - 1 end
  return i
end

-- The kind of the first token on the line of token i.
local function opening_kind(i) return kind(first_on_line(i)) end

-- The innermost ( { [ before token i that is still open there.
local function open_bracket(i)
  local depth = 0
  for k = i - 1, 1, -1 do
    if kind(k):find "^[%)%]}]$" then depth = depth + 1 end
    if kind(k):find "^[%(%[{]$" then
      if depth == 0 then return k end
      depth = depth - 1
    end
  end
end

-- What the tokens before i assign to: "self.count" of `self.count += 1`.
local function target(i)
  local first = i
  while first > 1 do
    local before = kind(first - 1) == "]" and open_bracket(first - 1) or first - 1
    if kind(before) ~= "NAME" and kind(before) ~= "[" then break end
    first = before
    if kind(before) == "NAME" then
      if kind(first - 1) ~= "." and kind(first - 1) ~= ":" then break end
      first = first - 1
    end
  end
  return first == i and "x" or text:sub(tokens[first].first, tokens[i - 1].last)
end

-- Operators ------------------------------------------------------------------------------------------------------------------

local ARITHMETIC = set "+ - * / % ^ & | // .. << >>"

local function compound_assignment(i)
  if kind(i) == "=" then i = i - 1 end
  if not ARITHMETIC[kind(i)] or not joined(i, kind(i), "=") then return end
  local operator, to = word(i), target(i)
  return ("Lua has no %s=: write %s = %s %s ..."):format(operator, to, to, operator)
end

local function increment(i)
  if not joined(i, "+", "+") and joined(i - 1, "+", "+") then i = i - 1 end
  local to = target(i)
  if joined(i, "+", "+") then return ("Lua has no ++: write %s = %s + 1"):format(to, to) end
  local named = kind(i - 1) == "NAME" or kind(i - 1) == "]"
  if named and text:find("^%-%-", tokens[i - 1].last + 1) then return ("-- begins a comment: write %s = %s - 1"):format(to, to) end
end

local TESTS = set "if elseif while until"

local function comparison(i)
  local tests = TESTS[opening_kind(i)]
  if joined(i, "!", "=") or joined(i, "!", "==") then return "write ~= for !=" end
  if joined(i - 1, "<", ">") then return "write ~= for <>" end
  if kind(i) == "!" then return "write not x for !x" end
  if joined(i - 1, "==", "=") then return "write == for ===" end
  if joined(i - 1, "=", "<") or joined(i, "=", "<") then return "write <= for =<" end
  if tests and joined(i, "=", ">") then return "write >= for =>" end
  if kind(i) == "=" and tests and not says "arguments expected" then return "= assigns; == compares" end
  if kind(i) == "~=" and says "syntax error" then return "~= compares: if a ~= b then ... end" end
end

local function logic(i)
  if joined(i - 1, "&", "&") or joined(i, "&", "&") then return "write a and b for &&; of tensors m.logical_and(a, b)" end
  if joined(i - 1, "|", "|") or joined(i, "|", "|") then return "write a or b for ||; of tensors m.logical_or(a, b)" end
  if kind(i) == "?" or kind(i) == "else" and says "'then' expected" then
    return "c and a or b chooses; of tensors m.where(c, a, b)"
  end
  if word(i) == "is" then return "== compares: x == nil, x ~= nil" end
  local inside = kind(i) == "in" or kind(i) == "not" and kind(i + 1) == "in"
  if inside and says "'then' expected" then return "Lua has no test by in: keep a set, if set[x] then" end
end

-- Whether a line begins a Python function without a name before token i.
local function has_lambda(from, i)
  for k = first_on_line(from), i - 1 do
    if word(k) == "lambda" then return true end
  end
end

local function other_operators(i)
  if kind(i) == "@" then
    return is_first(i) and "Lua has no decorators: local f = decorate(function(x) ... end)"
      or 'Lua has no @: a:dot(b, "embed") sums products over the axis'
  end
  if joined(i - 1, "*", "*") then return "write x ^ 2 for **" end
  -- Of x: x the last is a method's name for Lua, and the call continues on the next line.
  local arrow = joined(i, "=", ">") or joined(i - 1, "-", ">") or has_lambda(i, i) or i > 1 and is_first(i) and has_lambda(i - 1, i)
  if arrow then return "write function(x) return ... end" end
end

-- Comments, texts, numbers, characters ---------------------------------------------------------------------------------------

local function comment(i)
  if kind(i) == "#" or kind(i) == "//" and is_first(i) then return "comments begin with --" end
  if joined(i, "/", "*") then return "comments are --[[ ... ]], or begin with --" end
  if (word(i) == '""' or word(i) == "''") and joined(i, "STRING", "STRING") then
    return "comments begin with --; [[ ... ]] is a text of several lines"
  end
  if kind(i) ~= "NAME" or kind(i - 1) ~= "NAME" then return end
  for k = first_on_line(i), i - 1 do
    if kind(k) == "//" then return "// divides; comments begin with --" end
  end
end

local function text_or_number(i)
  if says "unfinished string" then return "a text ends on the line where it begins; [[ ... ]] spans lines" end
  if says "unfinished long" then return "]] ends what [[ begins" end
  if not says "malformed number" then return end
  local number = message:match "near '(.*)$"
  if number:find("..", 1, true) then
    return opening_kind(i) == "for" and "for i = 1, 10 do ... end" or "leave a space between a number and .."
  end
  if number:find "_" then return "digits have no separators: 1000000" end
  return "a name does not begin with a digit; a product is 2 * x"
end

local CHARACTERS = {
  ["“"] = "texts are in \"...\" or '...'", ["”"] = "texts are in \"...\" or '...'",
  ["‘"] = "texts are in \"...\" or '...'", ["’"] = "texts are in \"...\" or '...'",
  ["−"] = "minus is -", ["–"] = "minus is -", ["×"] = "times is *", ["⋅"] = "times is *",
  ["≤"] = "write <=", ["≥"] = "write >=", ["≠"] = "write ~=",
  ["\u{A0}"] = "it is a space that does not break (U+00A0): type a space in its place",
}

local function is_foreign(i) return kind(i):find "^[\x80-\xFF]$" ~= nil end

-- A character that is not ASCII, outside of texts and comments.
local function character(i)
  if not is_foreign(i) or not says "near '<\\" then return end
  return CHARACTERS[text:match(utf8.charpattern, tokens[i].first)]
    or "names are made of a-z, A-Z, 0-9 and _; other characters belong in strings"
end

-- Words of other languages ---------------------------------------------------------------------------------------------------

local WORDS = {}
for hint, words in pairs {
  ["write elseif ... then"] = "elif elsif",
  ["write function f(x) ... end"] = "def func fn fun",
  ['begin with local m = require "mlua"'] = "import from using include",
  ['a class of modules is m.module("Net", function(self) ... end)'] = "class",
  ["write local x = ..."] = "var let auto int float double bool",
  ["write local x <const> = ..."] = "const",
  ["pcall(function() ... end) catches errors"] = "try except catch finally",
  ["error(message) raises"] = "raise throw",
  ["local file <close> = io.open(path) closes it at the block's end"] = "with",
  ["an empty block needs no statement"] = "pass",
  ["goto continue, and ::continue:: before the loop's end"] = "continue",
  ["x = nil"] = "del",
  ["a name without local is global"] = "global",
  ["a function may set the locals around it"] = "nonlocal",
  ["if ... elseif ... else ... end"] = "switch match case",
  ["write end"] = "endif endfor endwhile endfunction",
  ["coroutine.wrap(function() ... end)"] = "async await",
} do
  for each in pairs(set(words)) do WORDS[each] = hint end
end

-- The word before the error, or the first on the line where that word is.
local function foreign_word(i)
  local before = math.max(i - 1, 1)
  for _, place in ipairs { before, first_on_line(before), first_on_line(i) } do
    if kind(place) == "NAME" and WORDS[word(place)] then return WORDS[word(place)] end
  end
end

local COLONS = {
  ["if"] = "write if ... then ... end",
  ["elseif"] = "write if ... then ... end",
  ["for"] = "write for i = 1, n do ... end",
  ["while"] = "write while ... do ... end",
  ["else"] = "write else without a colon",
  ["function"] = "write function f(x) ... end, without a colon",
  ["local"] = "write function f(x) ... end, without a colon",
}

-- The nearest colon before the error that ends its line. Lua takes the next word for a method, and finds the error later.
local function block_with_colon(i)
  local colon, k = nil, i
  while not colon and k >= 1 and line(k) + 20 > line(i) do
    if kind(k) == ":" and k < #tokens and line(k + 1) > line(k) then colon = k end
    k = k - 1
  end
  for at = first_on_line(i), says "arguments expected" and i or 0 do
    if kind(at) == ":" then
      colon = at
      break
    end
  end
  local first = colon and first_on_line(colon)
  local declares = first and kind(first) == "local" and kind(first + 1) ~= "function" -- local y = x:
  return first and not declares and COLONS[kind(first)]
end

local OPENINGS = set "if while for else function local do"

local function block_with_braces(i)
  local hint = "blocks have no braces: if ... then ... end, for ... do ... end"
  if kind(i) == "{" and OPENINGS[opening_kind(i)] and not says "'='" then return hint end
  if kind(i) == "}" and is_first(i) and not open_bracket(i) then return hint end
  if not says "'then' expected" and not says "'do' expected" then return end
  local opened = false -- `if (x) {` is a call
  for k = 1, i - 1 do
    opened = opened or kind(k) == "if" or kind(k) == "while"
    if opened and kind(k) == "{" and line(k + 1) > line(k) then return hint end
  end
end

local function loop(i)
  if opening_kind(i) == "for" and (kind(i) == ";" or kind(i) == "(" and kind(i - 1) == "for") then
    return "for i = 1, n do ... end counts"
  end
end

-- Brackets -------------------------------------------------------------------------------------------------------------------

local function index_or_list(i)
  local open, colon = open_bracket(i), kind(i) == ":" or kind(i - 1) == ":"
  local in_index = open and open > 1 and kind(open) == "[" and kind(open - 1) ~= "{" and kind(open - 1) ~= ","
  if in_index and (colon or kind(i) == "," or says "cannot use '...'") then
    return 't:slice("seq", start, stop) takes elements of a tensor, from 0'
  end
  if kind(i) == "[" and says "unexpected symbol" then return "a list is { 1, 2, 3 }" end
  if open and kind(open) == "{" and colon then return 'a table is { name = value, ["a text"] = value }' end
end

local function parameters(i)
  local open, here = open_bracket(i), kind(i)
  if opening_kind(i) == "local" and here == ":" and not open then return "variables have no types: local x = ..." end
  if not open or kind(open) ~= "(" or here ~= "=" and here ~= ":" then return end
  local name = open - 1
  while name > 1 and (kind(name) == "NAME" or kind(name) == "." or kind(name) == ":") do name = name - 1 end
  if kind(name) == "function" then
    return here == ":" and "parameters have no types" or "parameters have no defaults: if x == nil then x = 1 end"
  end
  if here == "=" and kind(i - 1) == "NAME" then return ("named arguments are a table: f(x, { %s = ... })"):format(word(i - 1)) end
end

local VALUES = set "NAME NUMBER STRING function nil true false not {"

local function bracket(i)
  local open = open_bracket(i)
  if kind(i):find "^[%)%]}]$" and not open then return ("one %s too many"):format(word(i)) end
  local closing = message:match "'([%)}%]])' expected"
  if not closing or not open then return end
  if line(i - 1) < line(i) then
    local hint = ("is a %s missing at the end of line %d, or a comma?"):format(closing, line(i - 1))
    return line(open) == line(i - 1) and hint or ("%s line %d has its %s"):format(hint, line(open), word(open))
  end
  if not VALUES[kind(i)] then return ("is a %s missing before this?"):format(closing) end
  return ("is a comma missing before %s, or a %s?"):format(word(i), closing)
end

-- Words of Lua ---------------------------------------------------------------------------------------------------------------

-- "x:" and "x." at the end of a line.
local function missing_name(i)
  if says "<name> expected" and kind(i - 1):find "^[.:]$" and line(i - 1) < line(i) then
    return ("is a name missing after the %s at the end of line %d?"):format(kind(i - 1), line(i - 1))
  end
end

local function keyword(i)
  local here = kind(i)
  if not here:find "^%l+$" then return end
  if says "<name> expected" then
    return here .. " is a word of Lua: " .. (kind(i - 1) == "." and ('write t["%s"]'):format(here) or "choose another name")
  end
  if kind(i + 1) == "=" then return ('%s is a word of Lua: { ["%s"] = ... }'):format(here, here) end
end

local function missing_word(i)
  local expected = message:match "'(then)' expected" or message:match "'(do)' expected"
  if expected and i > 1 and line(i - 1) < line(i) then return ("is %s missing at the end of line %d?"):format(expected, line(i - 1)) end
  if kind(i) == "(" and kind(i - 1) == "function" and says "<name> expected" then
    return "a function has a name, or is a value: local f = function(x) ... end"
  end
  if kind(i) == "=" and kind(i - 1) == ")" and says "syntax error" then return "a call cannot be assigned to" end
  if says "no visible label" then return "write ::continue:: before the loop's end" end
  local call = kind(i - 1) == "NAME" and says "syntax error" and VALUES[kind(i)] and line(i - 1) == line(i)
  if not call then return end
  if is_first(i - 1) then return ("a call has parentheses: %s(%s)"):format(word(i - 1), word(i)) end
  return ("is a comma or an operator missing before %s?"):format(word(i))
end

-- Missing ends ---------------------------------------------------------------------------------------------------------------

local BLOCKS, ENDS = set "function if do repeat", set "end until"

-- The column of the first token on the line of token i.
local function indentation(i) return tokens[first_on_line(i)].first - starts[line(i)] end

-- By the indentation of lines that begin with `end`: the opening word of a block that probably has none (an end further left
-- than it closes it), or, with `too_many`, the end that closes a block further left.
local function odd_block(stop, too_many)
  local open = {}
  for i = 1, stop - 1 do
    if BLOCKS[kind(i)] then
      if kind(i) == "if" and kind(i - 1) == "else" and not is_first(i) and not too_many then return i end -- `else if`
      open[#open + 1] = i
    elseif ENDS[kind(i)] then
      local opening = table.remove(open)
      if not opening then return nil end
      if is_first(i) and line(opening) ~= line(i) then
        local left, right = indentation(opening), indentation(i)
        if not too_many and right < left then return opening end
        if too_many and right > left then return i end
      end
    end
  end
  return not too_many and open[#open] or nil
end

-- The innermost block that is open at the error and began after the bracket that is open there, as in
-- m.module("Net", function(self) ... ).
local function block_in_bracket(stop)
  local closed = 0
  for i = stop - 1, open_bracket(stop) + 1, -1 do
    if ENDS[kind(i)] then closed = closed + 1 end
    if BLOCKS[kind(i)] then
      if closed == 0 then return i end
      closed = closed - 1
    end
  end
end

local function no_end(opening)
  if not opening then return nil end
  if kind(opening) == "if" and kind(opening - 1) == "else" then
    return ("line %d: else if opens an if with an end of its own; elseif does not"):format(line(opening))
  end
  return ("does the %s of line %d have an end?"):format(word(opening), line(opening))
end

local AFTER_RETURN = set "EOF else elseif until end ) } ,"

local function block_end(i)
  local one_missing, one_more, here, before = says "'end' expected", says "<eof> expected", kind(i), kind(i - 1)
  if one_more and here == "end" then
    local odd = odd_block(i, true)
    return odd and ("one end too many: is it that of line %d?"):format(line(odd)) or "one end too many"
  end
  local closes = here == ")" or here == "}" or here == ","
  local after_value = before == "end" or before == ")" or before == "}" or VALUES[before]
  if closes and open_bracket(i) and (one_missing or after_value) then return no_end(block_in_bracket(i)) end
  if not one_missing and not one_more then return nil end
  local opening = odd_block(i, false)
  local outside = opening and line(i) > line(i - 1) and indentation(i) <= indentation(opening)
  if one_missing and outside then return no_end(opening) end
  if not AFTER_RETURN[here] then return "return ends its block; do return x end leaves earlier" end
  return one_missing and no_end(opening) or nil
end

-- The rules: exact ones first, as a later one may match what an earlier one explains better.
local RULES = {
  text_or_number, character, compound_assignment, increment, comparison, logic, other_operators, comment, foreign_word,
  block_with_colon, loop, block_with_braces, index_or_list, parameters, block_end, missing_name, keyword, missing_word, bracket,
}

-- Whether Lua's message is about token i.
local function is_near(i, near)
  if near:find "^<eof>" then return kind(i) == "EOF" end
  if near:find "^'<\\" then return is_foreign(i) end
  local own = word(i)
  if near:sub(1, #own + 2) == "'" .. own .. "'" then return true end
  local cut = near:sub(1, 1) == "'" and near:sub(#own + 2, #own + 2) ~= "'" and (says "unfinished" or says "malformed")
  return cut and own:sub(1, 1) == near:sub(2, 2)
end

local syntax = {}

---A hint for Lua's message ("'then' expected near '='"), which is without its position, about a line of the text.
---@param source string
---@param at integer
---@param problem string
---@return string? hint
function syntax.hint(source, at, problem)
  local begin, stop = problem:find(" near ", 1, true)
  if not begin and not problem:find("no visible label", 1, true) then return nil end
  tokens, text, starts, message = core.tokens(source), source, { 1 }, problem
  for start in source:gmatch "\n()" do starts[#starts + 1] = start end
  for i = 1, #tokens do
    local there = tokens[i].line == at or kind(i) == "EOF"
    if there and (not begin or is_near(i, problem:sub(stop + 1))) then
      for _, rule in ipairs(RULES) do
        local hint = rule(i)
        if hint then return hint end
      end
    end
  end
end

return syntax
