-- The record in a state in which nothing runs, acted on by `owner`: what only matters in progress is left out.
local function ended(r, state, kind, owner, ends, now_ms, data)
  return {
    state = state, kind = kind, owner = owner, fence = r.fence, attempts = r.attempts, taken = r.taken, ends = ends, since = now_ms,
    print = r.print, data = data,
  }
end
