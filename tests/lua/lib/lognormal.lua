-- Lengths of documents, lognormal as Megatron publishes them; those outside of least and most are drawn anew.
---@param mean number
---@param sigma number of the logarithm
---@param least integer tokens
---@param most integer tokens
---@return fun(): integer
return function(mean, sigma, least, most)
  local mu = math.log(mean) - sigma ^ 2 / 2
  return function()
    while true do
      local normal = math.sqrt(-2 * math.log(1 - math.random())) * math.cos(2 * math.pi * math.random())
      local length = math.floor(math.exp(mu + sigma * normal) + 0.5)
      if length >= least and length <= most then return length end
    end
  end
end
