-- A text that no version of this repository changes: a Markov chain over the vocabulary, as u16 tokens
-- in a file. A token is followed by one of four of its own, equally likely, and one time in five by any:
-- either is drawn by Zipf's law, so that few tokens make most of the text and most are rare. A model
-- learns first which are frequent, then what follows which. Gives write(path, vocab), which gives the path.

-- SplitMix64's numbers of a key as shares of 1: the one at an index.
local function drawn(key, index)
  local x = key + (index + 1) * -7046029254386353131
  x = (x ~ (x >> 30)) * -4658895280553007687
  x = (x ~ (x >> 27)) * -7723592293110705685
  return ((x ~ (x >> 31)) >> 11) * 2.0 ^ -53
end

return function(path, vocab)
  vocab = math.min(vocab, 65536)
  local function zipf(u) return math.min(math.floor(vocab ^ u), vocab) - 1 end
  local packed, token = {}, 0
  for i = 1, 1 << 19 do
    local u = drawn(1, i)
    token = zipf(u < 0.8 and drawn(2, 4 * token + math.floor(5 * u)) or drawn(3, i))
    packed[i] = ("<I2"):pack(token)
  end
  local file <close> = assert(io.open(path, "wb"))
  assert(file:write(table.concat(packed)))
  return path
end
