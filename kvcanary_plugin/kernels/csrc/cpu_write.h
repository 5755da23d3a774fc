// The write step on the CPU, in two passes. The first walks the chains (several requests side by
// side: one chain is a row of multiplies that wait for each other) and keeps the running hash before
// every entry; the second stores the records in the order of the plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "cpu_pool.h"
#include "hash.h"
#include "integers.h"
#include "record.h"

namespace kvcanary {

struct WriteArguments {
  const int64_t* write_offsets;  // [capacity + 1]
  const int64_t* seed_slots;     // [capacity]
  int64_t num_requests;          // already clamped to the capacity
  const int64_t* request_uids;   // or null: all unknown
  const int64_t* identity_keys;  // or null: all 0
  IntArray input_ids;
  IntArray positions;
  IntArray out_cache_loc;
  IntArray expected_tokens;     // absent: no input assert
  IntArray expected_positions;  // absent: no input assert
  int64_t step;

  // Entries [begin, end) of a request. A broken plan must not lead outside the inputs.
  int64_t begin(int64_t request) const { return entry(write_offsets[request]); }
  int64_t end(int64_t request) const { return entry(write_offsets[request + 1]); }
  int64_t entry(int64_t offset) const {
    return std::clamp<int64_t>(offset, 0, input_ids.size);
  }
  int64_t uid(int64_t request) const { return request_uids ? request_uids[request] : kUnknown; }
  uint64_t identity_key(int64_t request) const {
    return identity_keys ? static_cast<uint64_t>(identity_keys[request]) : 0;
  }
};

// Where a chain starts: the running hash, and the position of the seed's record if there is one.
struct ChainStart {
  uint64_t hash;
  bool has_seed;
  int64_t seed_position;
};

class Chains {
 public:
  Chains(const Pool& pool, const WriteArguments& arguments)
      : pool_(pool),
        arguments_(arguments),
        starts_(static_cast<size_t>(arguments.num_requests)),
        prev_hashes_(static_cast<size_t>(arguments.input_ids.size)) {
    find_starts();
  }

  const ChainStart& start(int64_t request) const { return starts_[static_cast<size_t>(request)]; }
  uint64_t prev_hash(int64_t entry) const { return prev_hashes_[static_cast<size_t>(entry)]; }

 private:
  struct Writer {
    int64_t request;
    int64_t entry;
  };

  // One of the chains that are walked side by side.
  struct Lane {
    int64_t entry = 0;
    int64_t end = 0;
    uint64_t hash = 0;

    int64_t left() const { return end - entry; }
  };
  static constexpr int kLanes = 4;

  void find_starts() {
    std::vector<int64_t> ready, waiting;
    for (int64_t request = 0; request < arguments_.num_requests; ++request) {
      const int64_t seed = arguments_.seed_slots[request];
      const bool waits = pool_.is_real_slot(seed) && pool_.in_flight(seed, arguments_.step);
      (waits ? waiting : ready).push_back(request);
      starts_[static_cast<size_t>(request)] = from_record(request);
    }
    if (waiting.empty()) {
      walk(ready);
    } else {
      walk_in_order(ready, waiting);
    }
  }

  ChainStart from_record(int64_t request) const {
    const int64_t seed = arguments_.seed_slots[request];
    if (!pool_.contains(seed)) {
      return {chain_start(arguments_.identity_key(request)), false, kUnknown};
    }
    const Record& record = pool_.record(seed);
    return {Pool::chain_after(record), true, record.position};
  }

  // A prefix hit within one batch: the seed is a slot that another request of this plan writes, so
  // that one's chain has to be walked first. What waits in a circle (impossible in a sane plan)
  // continues from the stored records.
  void walk_in_order(std::vector<int64_t> ready, std::vector<int64_t> waiting) {
    const std::unordered_map<int64_t, Writer> writers = writers_of_seeds(waiting);
    std::vector<bool> walked(starts_.size(), false);
    const auto walk_now = [&](const std::vector<int64_t>& requests) {
      walk(requests);
      for (int64_t request : requests) walked[static_cast<size_t>(request)] = true;
    };
    const auto split = std::stable_partition(
        waiting.begin(), waiting.end(),
        [&](int64_t request) { return writers.count(arguments_.seed_slots[request]) != 0; });
    ready.insert(ready.end(), split, waiting.end());  // written, but not by this plan
    waiting.erase(split, waiting.end());
    walk_now(ready);

    while (!waiting.empty()) {
      const auto still_waiting =
          std::stable_partition(waiting.begin(), waiting.end(), [&](int64_t request) {
            const Writer& writer = writers.at(arguments_.seed_slots[request]);
            return !walked[static_cast<size_t>(writer.request)];
          });
      std::vector<int64_t> next(still_waiting, waiting.end());
      if (next.empty()) break;
      waiting.erase(still_waiting, waiting.end());
      for (int64_t request : next) {
        const int64_t entry = writers.at(arguments_.seed_slots[request]).entry;
        const int64_t position = arguments_.positions[entry];
        starts_[static_cast<size_t>(request)] = {
            splitmix64_mix3(prev_hash(entry), static_cast<uint64_t>(arguments_.input_ids[entry]),
                            static_cast<uint64_t>(position)),
            true, position};
      }
      walk_now(next);
    }
    walk_now(waiting);
  }

  // The last entry of the plan that writes each of the seeds.
  std::unordered_map<int64_t, Writer> writers_of_seeds(const std::vector<int64_t>& waiting) const {
    std::unordered_map<int64_t, Writer> candidates, writers;
    for (int64_t request : waiting) candidates[arguments_.seed_slots[request]] = {};
    for (int64_t request = 0; request < arguments_.num_requests; ++request) {
      for (int64_t entry = arguments_.begin(request); entry < arguments_.end(request); ++entry) {
        const int64_t slot = arguments_.out_cache_loc[entry];
        if (candidates.count(slot) != 0) writers[slot] = {request, entry};
      }
    }
    return writers;
  }

  // Fills prev_hashes_ for the entries of `requests`, kLanes chains side by side while there are as
  // many.
  void walk(const std::vector<int64_t>& requests) {
    Lane lanes[kLanes];
    size_t next = 0;
    for (;;) {
      for (Lane& lane : lanes) {
        while (lane.left() <= 0 && next < requests.size()) {
          const int64_t request = requests[next++];
          lane = {arguments_.begin(request), arguments_.end(request), start(request).hash};
        }
      }
      const int64_t steps =
          std::min({lanes[0].left(), lanes[1].left(), lanes[2].left(), lanes[3].left()});
      if (steps <= 0) break;
      advance_all(lanes, steps);
    }
    for (Lane& lane : lanes) {
      uint64_t hash = lane.hash;
      for (int64_t entry = lane.entry; entry < lane.end; ++entry) hash = advance(entry, hash);
    }
  }

  void advance_all(Lane (&lanes)[kLanes], int64_t steps) {
    uint64_t hash[kLanes] = {lanes[0].hash, lanes[1].hash, lanes[2].hash, lanes[3].hash};
    for (int64_t step = 0; step < steps; ++step) {
      for (int lane = 0; lane < kLanes; ++lane) {
        hash[lane] = advance(lanes[lane].entry + step, hash[lane]);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane].entry += steps;
      lanes[lane].hash = hash[lane];
    }
  }

  // Keeps the running hash before an entry and returns the one behind it.
  uint64_t advance(int64_t entry, uint64_t hash) {
    prev_hashes_[static_cast<size_t>(entry)] = hash;
    const uint64_t next =
        splitmix64_mix3(hash, static_cast<uint64_t>(arguments_.input_ids[entry]),
                        static_cast<uint64_t>(arguments_.positions[entry]));
    return arguments_.out_cache_loc[entry] >= 0 ? next : hash;  // below 0: skipped
  }

  const Pool& pool_;
  const WriteArguments& arguments_;
  std::vector<ChainStart> starts_;
  std::vector<uint64_t> prev_hashes_;
};

// Stores the entries of one request; returns how many records that were.
inline int64_t store_request(const Pool& pool, const WriteArguments& arguments,
                             const Chains& chains, int64_t request) {
  const int64_t begin = arguments.begin(request), end = arguments.end(request);
  const int64_t uid = arguments.uid(request);
  const auto row_for = [&](int64_t slot, int64_t bits) {
    ViolationRow row = unknown_row(slot, bits, arguments.step);
    row.request_uid = uid;
    row.batch_row = request;
    return row;
  };
  if (begin < end && arguments.seed_slots[request] >= pool.context().num_slots) {
    pool.report(row_for(arguments.seed_slots[request], kOutOfPool));
  }

  const bool asserts_inputs = arguments.expected_tokens.present();
  const bool asserts_positions =
      chains.start(request).has_seed &&
      *reinterpret_cast<const int32_t*>(pool.context().chain_position_assert) == 1;
  int64_t previous_position = chains.start(request).seed_position;
  int64_t stored = 0;
  for (int64_t entry = begin; entry < end; ++entry) {
    if (entry + kPrefetchDistance < end) {
      pool.prefetch_for_writing(arguments.out_cache_loc[entry + kPrefetchDistance]);
    }
    const int64_t slot = arguments.out_cache_loc[entry];
    if (slot < 0) continue;
    const int64_t token = arguments.input_ids[entry];
    const int64_t position = arguments.positions[entry];
    const uint64_t prev_hash = chains.prev_hash(entry);

    const auto report = [&](int64_t bits, int64_t expected_token, int64_t expected_position) {
      ViolationRow row = row_for(slot, bits);
      row.position = position;
      row.stored_token = token;
      row.stored_chain_hash = static_cast<int64_t>(prev_hash);
      row.expected_token = expected_token;
      row.expected_aux = expected_position;
      row.expected_position = expected_position;
      pool.report(row);
    };
    int64_t expected_token = kUnknown, expected_position = kUnknown;
    if (asserts_inputs) {
      expected_token = arguments.expected_tokens[entry];
      expected_position = arguments.expected_positions[entry];
      int64_t bits = 0;
      if (token != expected_token) bits |= kWriteToken;
      if (position != expected_position) bits |= kWritePosition;
      if (bits != 0) report(bits, expected_token, expected_position);
    }
    if (asserts_positions) {
      const int64_t following = static_cast<int64_t>(static_cast<uint64_t>(previous_position) + 1);
      if (position != following) report(kWritePosition, token, following);
      previous_position = position;
    }
    if (!pool.contains(slot)) {
      report(kOutOfPool, expected_token, expected_position);
      continue;
    }

    const bool tracked = pool.has_slot_table() && slot != kPaddingSlot;
    if (tracked) {
      int64_t& owner = pool.owner_uid(slot);
      if (pool.tracks_allocation() && owner != kUnknown && owner != uid && uid != kUnknown) {
        report(kWriteOwned, expected_token, expected_position);
      }
      if (owner == kUnknown) owner = uid;
      pool.writer_uid(slot) = uid;
      pool.writer_step(slot) = arguments.step;
      const bool stays_free = pool.tracks_allocation() && pool.state(slot) == kFree;
      if (!stays_free) pool.set_state(slot, kWritten);
    }
    pool.record(slot) = {token, position, prev_hash, pool.folds_real_kv() ? pool.fold(slot) : 0};
    ++stored;
  }
  return stored;
}

inline void write_records(const Pool& pool, const WriteArguments& arguments) {
  const Chains chains(pool, arguments);
  int64_t stored = 0;
  for (int64_t request = 0; request < arguments.num_requests; ++request) {
    stored += store_request(pool, arguments, chains, request);
  }
  pool.count_launch(stored);
}

}  // namespace kvcanary
