// The simulated accelerator: a PrivateUse1 device whose kernels and copies are tasks on the threads
// of its streams. README.md beside this file says what it has and what it lacks.
//
// The host cannot touch device memory, which is mapped twice: the addresses that tensors have are
// PROT_NONE, and kernels use a second mapping. A checker keeps a vector clock for each stream and
// looks at every access, whatever the timing. The cost model is off by default: Note [Costs].
#include <torch/extension.h>
#include <torch/library.h>
#include <ATen/autocast_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Stream;
using c10::StreamId;
using Clock = std::chrono::steady_clock;

namespace sim {

static size_t env_bytes(const char* name, double otherwise) {
  const char* e = getenv(name);
  return size_t(e && *e ? atof(e) : otherwise);
}
// How many addresses all devices have together.
static const size_t ARENA = env_bytes("SIM_ARENA", double(size_t(24) << 30));
constexpr int POOL = 32;  // streams of a device, handed out in turn, as CUDA does
static int n_devices() {
  static int n = [] {
    const char* e = getenv("SIM_DEVICES");
    return e ? atoi(e) : 2;
  }();
  return n;
}

static char *g_guarded, *g_real;
static void init_arena() {
  static bool once = [] {
    g_guarded =
        (char*)mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    g_real = (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(g_guarded != MAP_FAILED && g_real != MAP_FAILED, "mmap");
    return true;
  }();
  (void)once;
}
static bool is_device_ptr(const void* p) {
  return (char*)p >= g_guarded && (char*)p < g_guarded + ARENA;
}
static char* real(const void* p) {
  return p == nullptr ? nullptr : g_real + ((char*)p - g_guarded);
}

// ---- vector clocks
using VC = std::map<int, uint64_t>;  // agent -> count
static void join(VC& a, const VC& b) {
  for (auto& [k, v] : b) {
    auto& m = a[k];
    if (v > m) m = v;
  }
}
static std::mutex g_hb;  // guards all clocks and access records
static VC g_host;        // of all host threads together: their own locks then raise no alarm
static std::atomic<bool> g_check{true};
static std::map<std::string, std::pair<uint64_t, std::string>> g_races;
static std::string g_new_race;  // for SIM_STACK
static void print_stack() {
  static bool wanted = getenv("SIM_STACK") != nullptr;
  std::string what = std::move(g_new_race);
  g_new_race.clear();
  if (!wanted || what.empty()) return;
  py::gil_scoped_acquire gil;
  fprintf(stderr, "[sim] race: %s\n", what.c_str());
  py::module_::import("traceback").attr("print_stack")();
}

// ---- settings
struct Delay {
  double p = 0;
  int max_us = 0;
};
static std::mutex g_cfg;
static Delay g_delay_default, g_delay_side;
static std::atomic<bool> g_poison{true}, g_strict{[] {
  const char* e = getenv("SIM_STRICT");
  return e && *e && *e != '0';
}()};
static std::atomic<int> g_sync_mode{0};
static std::atomic<uint64_t> g_syncs{0}, g_async_ops{0}, g_copies{0}, g_seed{1};
static std::mutex g_names;
static std::map<std::string, uint64_t> g_sync_ops, g_async_names;
static std::mutex g_err;
static std::string g_error;

// Note [Costs]
// Every stream has a clock, `vt`, which says when its last task ended in simulated time. A device
// has three engines: copies up, copies down and kernels. A task starts at the latest of four times:
// when it was enqueued, when the task before it ended, when the events that it waits for were
// reached, and when its engine is free. It then holds the engine for its cost. Its arithmetic runs
// at once, within the real time that the cost takes anyway; after it the thread sleeps until `vt`.
// Clocks add up, not sleeps: where a sleep or slow arithmetic was late, the next tasks make up for
// it. No event is reached and no stream is idle before `vt`; elapsed_time compares these clocks.
enum Engine { NO_ENGINE = -1, UP, DOWN, KERNELS, ENGINES };
struct Work {
  int engine = NO_ENGINE;
  double seconds = 0;
  Clock::time_point since = {};
};
// Bytes and flops a second, where 0 takes no time; `launch` is in seconds.
struct Costs {
  double up = 0, down = 0, memory = 0, flops = 0, launch = 0;
};
static Costs g_costs;
static std::atomic<bool> g_cost{false}, g_arithmetic{true};
struct EngineState {
  std::mutex m;
  Clock::time_point free;
  double busy = 0;
};
static EngineState g_engines[16][ENGINES];
// By how much a stream was behind its clock at most when it had caught up.
static std::atomic<int64_t> g_late_us{0};
static Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}
static Work work(int engine, double bytes, double flops = 0) {
  if (!g_cost) return {};
  double rate = engine == UP ? g_costs.up : engine == DOWN ? g_costs.down : g_costs.memory;
  return {
      engine,
      std::max(rate ? bytes / rate : 0, g_costs.flops ? flops / g_costs.flops : 0) + g_costs.launch,
      Clock::now()};
}

static bool poisons() { return g_poison && g_arithmetic; }
static void raise_error() {
  std::lock_guard<std::mutex> l(g_err);
  if (!g_error.empty()) {
    auto e = g_error;
    g_error.clear();
    TORCH_CHECK(false, "a kernel failed on the simulated device: ", e);
  }
}
static void note_sync(const char* what) {
  g_syncs++;
  int m = g_sync_mode;
  if (m == 1) TORCH_WARN("called a synchronizing simulated operation: ", what);
  if (m == 2) TORCH_CHECK(false, "called a synchronizing simulated operation: ", what);
}

// ---- events
struct Event {
  std::mutex m;
  std::condition_variable cv;
  uint64_t recorded = 0, completed = 0;
  bool timing = false;
  int device = -1;
  Clock::time_point at;
  std::deque<std::pair<uint64_t, Clock::time_point>> times;  // of the last records, with costs
  VC vc;
  Clock::time_point wait(uint64_t v) {
    std::unique_lock<std::mutex> l(m);
    cv.wait(l, [&] { return completed >= v; });
    for (auto& [k, t] : times)
      if (k == v) return t;
    return at;
  }
  void reach(uint64_t v, Clock::time_point t) {
    {
      std::lock_guard<std::mutex> l(m);
      if (v > completed) completed = v;
      at = t;
      if (g_cost) {
        times.push_back({v, t});
        if (times.size() > 8) times.pop_front();
      }
    }
    cv.notify_all();
  }
};

// ---- streams
struct Task {
  std::function<void()> f;
  Work work;
};
struct StreamImpl {
  int agent;
  DeviceIndex device;
  StreamId id;
  std::mutex m;
  std::condition_variable cv, idle;
  std::deque<Task> q;
  Clock::time_point vt;  // its own thread's
  uint64_t in = 0, out = 0;
  VC vc;  // of everything enqueued so far
  std::thread t;
  std::mt19937_64 rng;
  StreamImpl(int a, DeviceIndex d, StreamId i)
      : agent(a), device(d), id(i), rng(g_seed + a * 7919) {
    t = std::thread([this] { run(); });
    t.detach();
  }
  void run() {
    at::set_num_threads(1);
    prctl(PR_SET_TIMERSLACK, 1000);  // ns
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> l(m);
        cv.wait(l, [&] { return !q.empty(); });
        task = std::move(q.front());
        q.pop_front();
      }
      auto& f = task.f;
      if (g_cost) begin(task);
      Delay d;
      {
        std::lock_guard<std::mutex> l(g_cfg);
        d = id == 0 ? g_delay_default : g_delay_side;
      }
      if (d.max_us > 0 && std::uniform_real_distribution<double>(0, 1)(rng) < d.p) {
        auto us = std::chrono::microseconds(std::uniform_int_distribution<int>(0, d.max_us)(rng));
        if (g_cost) vt += us;
        std::this_thread::sleep_for(us);
      }
      try {
        f();
      } catch (const c10::Error& e) {
        std::lock_guard<std::mutex> l(g_err);
        if (g_error.empty()) g_error = e.what_without_backtrace();
        fprintf(stderr, "[sim] kernel failed: %s\n", e.what_without_backtrace());
      } catch (const std::exception& e) {
        std::lock_guard<std::mutex> l(g_err);
        if (g_error.empty()) g_error = e.what();
        fprintf(stderr, "[sim] kernel failed: %s\n", e.what());
      }
      f = nullptr;
      if (g_cost) pace();
      {
        std::lock_guard<std::mutex> l(m);
        out++;
      }
      idle.notify_all();
    }
  }
  void begin(const Task& task) {
    vt = std::max(vt, task.work.since);
    auto takes = seconds(task.work.seconds);
    if (task.work.engine == NO_ENGINE) {
      vt += takes;
      return;
    }
    auto& e = g_engines[device][task.work.engine];
    std::lock_guard<std::mutex> l(e.m);
    vt = std::max(vt, e.free) + takes;
    e.free = vt;
    e.busy += task.work.seconds;
  }
  // Before the host may see what this stream has done so far.
  void catch_up() {
    auto now = Clock::now();
    if (vt > now) {
      std::this_thread::sleep_until(vt);
      return;
    }
    int64_t late = std::chrono::duration_cast<std::chrono::microseconds>(now - vt).count(),
            most = g_late_us;
    while (late > most && !g_late_us.compare_exchange_weak(most, late)) {}
  }
  // Keep the thread near its clock; a tiny task is not worth a sleep of its own.
  void pace() {
    bool last;
    {
      std::lock_guard<std::mutex> l(m);
      last = q.empty();
    }
    if (last || vt > Clock::now() + std::chrono::microseconds(100)) catch_up();
  }
  void enqueue(std::function<void()> f, Work w = {}) {
    if (g_cost && w.engine == NO_ENGINE) w.since = Clock::now();
    {
      std::lock_guard<std::mutex> l(m);
      q.push_back({std::move(f), w});
      in++;
    }
    cv.notify_one();
  }
  void wait_event(const std::shared_ptr<Event>& e, uint64_t v) {
    enqueue([this, e, v] {
      auto t = e->wait(v);
      if (g_cost) vt = std::max(vt, t);
    });
  }
  // Wait until the stream is idle; the checker does not take this for an order.
  void wait_quietly() {
    std::unique_lock<std::mutex> l(m);
    uint64_t want = in;
    idle.wait(l, [&] { return out >= want; });
  }
  bool query() {
    std::lock_guard<std::mutex> l(m);
    return out >= in;
  }
  void synchronize() {
    VC upto;
    {
      std::lock_guard<std::mutex> l(g_hb);
      upto = vc;
    }
    wait_quietly();
    {
      std::lock_guard<std::mutex> l(g_hb);
      join(g_host, upto);
    }
    raise_error();
  }
};

static std::mutex g_streams_m;
static std::map<std::pair<int, StreamId>, StreamImpl*> g_streams;
static StreamImpl& stream_of(DeviceIndex d, StreamId id) {
  std::lock_guard<std::mutex> l(g_streams_m);
  auto& s = g_streams[{d, id}];
  if (!s) s = new StreamImpl(int(d) * 1000 + int(id), d, id);
  return *s;
}
static StreamImpl& impl_of(const Stream& s) { return stream_of(s.device_index(), s.id()); }
static std::atomic<int> g_next[16];
static thread_local DeviceIndex t_device = 0;
static thread_local StreamId t_stream[16] = {};
static Stream make(DeviceIndex d, StreamId id) {
  return Stream(Stream::UNSAFE, Device(c10::DeviceType::PrivateUse1, d), id);
}
static StreamImpl& current(DeviceIndex d) { return stream_of(d, t_stream[d]); }
static Stream new_stream(DeviceIndex d) {
  if (d < 0) d = t_device;
  return make(d, 1 + (g_next[d]++ % POOL));
}

// Advance the clock of a stream, which knows all that the host knows. The caller holds g_hb.
static uint64_t tick(StreamImpl& s) {
  join(s.vc, g_host);
  return ++s.vc[s.agent];
}

// ---- happens-before checker: accesses of each byte range
struct Access {
  char *lo, *hi;
  int agent;
  uint64_t at;
  bool write;
  std::string op;
};
static std::map<char*, std::vector<Access>> g_accesses;  // by block start (guarded or pinned)
static std::map<char*, size_t> g_blocks;                 // start -> size, of all blocks
static char* block_of(char* p) {
  auto it = g_blocks.upper_bound(p);
  if (it == g_blocks.begin()) return nullptr;
  --it;
  return p < it->first + it->second ? it->first : nullptr;
}
static void access(const VC& vc, int agent, uint64_t at, char* lo, char* hi, bool write,
                   const std::string& op) {
  if (lo >= hi) return;
  char* b = block_of(lo);
  if (!b) return;
  auto& v = g_accesses[b];
  std::vector<Access> kept;
  kept.reserve(v.size() + 1);
  for (auto& a : v) {
    bool overlap = a.lo < hi && lo < a.hi;
    auto it = vc.find(a.agent);
    bool ordered = a.agent == agent || (it != vc.end() && it->second >= a.at);
    if (overlap && !ordered && (a.write || write)) {
      std::string k = a.op + (a.write ? " (write)" : " (read)") + " on stream " +
                      std::to_string(a.agent) + "  ||  " + op + (write ? " (write)" : " (read)") +
                      " on stream " + std::to_string(agent);
      auto& r = g_races[k];
      if (r.first++ == 0) {
        g_new_race = k;
        char t[80];
        snprintf(t, 80, "block %p of %zu bytes", (void*)b, g_blocks[b]);
        r.second = t;
      }
    }
    bool covered = a.lo >= lo && a.hi <= hi;
    bool drop = ordered && covered && (write || (!a.write && a.agent == agent));
    if (!drop) kept.push_back(std::move(a));
  }
  kept.push_back({lo, hi, agent, at, write, op});
  v = std::move(kept);
}

// ---- pinned host memory, which is used again once all copies from and to it are done
struct Pinned {
  char* p;
  size_t n;
  int uses = 0;
  bool freed = false, touched = true;
};
static std::mutex g_pin;
static std::map<char*, Pinned> g_pinned;
static std::map<size_t, std::vector<char*>> g_pin_free;
static void pin_recycle(Pinned& b) {  // the caller holds g_pin
  if (poisons() && b.touched) memset(b.p, 0xFF, b.n);
  g_pin_free[b.n].push_back(b.p);
}
static Pinned* pin_find(const void* p) {
  auto it = g_pinned.upper_bound((char*)p);
  if (it == g_pinned.begin()) return nullptr;
  --it;
  return (char*)p < it->second.p + it->second.n ? &it->second : nullptr;
}
static bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> l(g_pin);
  auto b = pin_find(p);
  return b && !b->freed;
}
static void pin_use(const void* p, int by) {
  std::lock_guard<std::mutex> l(g_pin);
  auto b = pin_find(p);
  if (!b) return;
  b->uses += by;
  if (b->uses == 0 && b->freed) pin_recycle(*b);
}
static void pin_delete(void* p) {
  std::lock_guard<std::mutex> l(g_pin);
  auto& b = g_pinned[(char*)p];
  b.freed = true;
  if (b.uses == 0) pin_recycle(b);
}
struct HostAlloc final : at::HostAllocator {
  at::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &pin_delete, at::Device(at::kCPU)};
    n = (n + 511) / 512 * 512;
    std::lock_guard<std::mutex> l(g_pin);
    auto& fl = g_pin_free[n];
    char* p;
    if (!fl.empty()) {
      p = fl.back();
      fl.pop_back();
    } else {
      p = (char*)aligned_alloc(512, n);
      if (poisons()) memset(p, 0xFF, n);
    }
    g_pinned[p] = Pinned{p, n, 0, false, g_arithmetic};
    {
      std::lock_guard<std::mutex> h(g_hb);
      g_blocks[p] = n;
      g_accesses[p].clear();
    }
    return {p, p, &pin_delete, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &pin_delete; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static HostAlloc g_host_alloc;

// ---- device memory: as with CUDA's allocator a freed block can be had at once on its own stream
struct Block {
  char* p;
  size_t n;
  DeviceIndex device;
  StreamId stream;
  std::set<StreamId> used;
  size_t counted;
  bool touched;
};
struct Deferred {
  Block b;
  std::vector<std::pair<std::shared_ptr<Event>, uint64_t>> events;
};
static std::mutex g_mem;
static std::map<char*, Block> g_live;
static std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<Block>> g_free;
static std::deque<Deferred> g_deferred;
static size_t g_top = 0;

// The bytes of a device, counted as CUDA's allocator would if nothing were fragmented. A block is
// allocated until it is freed, active until other streams are done with it, and reserved in the
// pool of its stream until the cache is emptied. g_mem guards these.
struct Memory {
  struct Pool {
    size_t active = 0, most = 0;
  };
  c10::CachingAllocator::Stat allocated, active, reserved, blocks;
  int64_t retries = 0, ooms = 0;
  std::map<StreamId, Pool> pools;
  size_t reserved_with(StreamId s, size_t n) {
    auto& p = pools[s];
    return reserved.current + (p.active + n > p.most ? p.active + n - p.most : 0);
  }
  void take(StreamId s, size_t n) {
    auto& p = pools[s];
    reserved.increase(reserved_with(s, n) - reserved.current);
    p.active += n;
    p.most = std::max(p.most, p.active);
    active.increase(n);
    allocated.increase(n);
    blocks.increase(1);
  }
  void give_back(StreamId s, size_t n) {
    pools[s].active -= n;
    active.decrease(n);
  }
  void flush() {
    for (auto& [s, p] : pools) {
      reserved.decrease(p.most - p.active);
      p.most = p.active;
    }
  }
};
static Memory g_memory[16];
static std::atomic<size_t> g_total{env_bytes("SIM_MEMORY", 0)};  // of each device; 0: no end
static std::atomic<uint64_t> g_reused{0}, g_deferred_n{0};

static void record_on(StreamImpl& s, const std::shared_ptr<Event>& e) {
  uint64_t v;
  {
    std::lock_guard<std::mutex> h(g_hb);
    tick(s);
    std::lock_guard<std::mutex> l(e->m);
    v = ++e->recorded;
    e->vc = s.vc;
  }
  s.enqueue([e, v, &s] {
    if (g_cost) s.catch_up();
    e->reach(v, g_cost ? s.vt : Clock::now());
  });
}
// Write to a block as if its next owner did so at once.
static void poison(const Block& b, const char* what = "reuse after free") {
  if (!g_poison) return;
  auto& s = stream_of(b.device, b.stream);
  {
    std::lock_guard<std::mutex> h(g_hb);
    auto at = tick(s);
    if (g_check) access(s.vc, s.agent, at, b.p, b.p + b.n, true, what);
  }
  char* r = real(b.p);
  size_t n = b.n;
  if (g_arithmetic && b.touched) s.enqueue([r, n] { memset(r, 0xFF, n); });
}
static void process_deferred() {  // the caller holds g_mem
  for (auto it = g_deferred.begin(); it != g_deferred.end();) {
    bool done = true;
    for (auto& [e, v] : it->events) {
      std::lock_guard<std::mutex> l(e->m);
      if (e->completed < v) {
        done = false;
        break;
      }
    }
    if (!done) {
      ++it;
      continue;
    }
    {
      std::lock_guard<std::mutex> h(g_hb);
      auto& acc = g_accesses[it->b.p];
      std::vector<Access> kept;
      for (auto& a : acc) {
        bool covered = false;
        for (auto& [e, v] : it->events) {
          auto f = e->vc.find(a.agent);
          if (f != e->vc.end() && f->second >= a.at) covered = true;
        }
        if (!covered) kept.push_back(a);
      }
      acc = kept;
    }
    it->b.used.clear();
    g_memory[it->b.device].give_back(it->b.stream, it->b.counted);
    poison(it->b);
    g_free[{it->b.device, it->b.stream, it->b.n}].push_back(it->b);
    it = g_deferred.erase(it);
  }
}
static void dev_free(void* p) {
  std::lock_guard<std::mutex> l(g_mem);
  auto it = g_live.find((char*)p);
  if (it == g_live.end()) return;
  Block b = it->second;
  g_live.erase(it);
  g_memory[b.device].allocated.decrease(b.counted);
  g_memory[b.device].blocks.decrease(1);
  b.used.erase(b.stream);
  if (b.used.empty()) {
    g_memory[b.device].give_back(b.stream, b.counted);
    poison(b);
    g_free[{b.device, b.stream, b.n}].push_back(b);
    return;
  }
  g_deferred_n++;
  Deferred d{b, {}};
  for (auto s : b.used) {
    auto e = std::make_shared<Event>();
    record_on(stream_of(b.device, s), e);
    d.events.push_back({e, 1});
  }
  g_deferred.push_back(std::move(d));
}
// As cudaFree this waits for the device, which orders nothing. The caller holds g_mem.
static void flush(DeviceIndex d) {
  for (auto& f : g_deferred)
    for (auto& [e, v] : f.events)
      if (f.b.device == d) e->wait(v);
  process_deferred();
  std::vector<StreamImpl*> all;
  {
    std::lock_guard<std::mutex> l(g_streams_m);
    for (auto& [k, s] : g_streams)
      if (k.first == d) all.push_back(s);
  }
  for (auto s : all) s->wait_quietly();
  g_memory[d].flush();
}
static void make_room(DeviceIndex d, StreamId s, size_t n) {  // the caller holds g_mem
  auto& m = g_memory[d];
  if (!g_total || m.reserved_with(s, n) <= g_total) return;
  m.retries++;
  flush(d);
  if (m.reserved_with(s, n) <= g_total) return;
  m.ooms++;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device out of memory. Tried to allocate ", n,
                   " bytes. Device ", int(d), " has a total capacity of ", size_t(g_total),
                   " bytes of which ", g_total - m.active.current, " bytes are free.");
}
struct DevAlloc final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t n) override {
    init_arena();
    raise_error();
    auto dev = t_device;
    at::Device device(c10::DeviceType::PrivateUse1, dev);
    if (n == 0) return {nullptr, nullptr, &dev_free, device};
    const size_t counted = (n + 511) / 512 * 512;
    n = n <= (1 << 20) ? counted : (n + (2 << 20) - 1) / (2 << 20) * (2 << 20);
    std::lock_guard<std::mutex> l(g_mem);
    process_deferred();
    make_room(dev, t_stream[dev], counted);
    Block b;
    auto& fl = g_free[{dev, t_stream[dev], n}];
    if (!fl.empty()) {
      b = fl.back();
      fl.pop_back();
      g_reused++;
    } else {
      TORCH_CHECK(g_top + n + 512 <= ARENA,
                  "the simulated device has no more addresses: SIM_ARENA, in bytes, is ", ARENA);
      b = Block{g_guarded + g_top, n, dev, t_stream[dev], {}, 0, true};
      g_top += n + 512;  // a gap
      std::lock_guard<std::mutex> h(g_hb);
      g_blocks[b.p] = n;
    }
    b.counted = counted;
    b.touched = g_arithmetic;  // untouched memory is nowhere, so a block can have its real size
    g_live[b.p] = b;
    g_memory[dev].take(b.stream, counted);
    // No block is split here; this counts the memory as if it were.
    if (g_strict) poison(b, "its owner before, on the stream that it was allocated on");
    return {b.p, b.p, &dev_free, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &dev_free; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> l(g_mem);
    for (int d = 0; d < n_devices(); d++) flush(d);
  }
  void recordStream(const c10::DataPtr& p, Stream s) override {
    if (!p.get()) return;
    std::lock_guard<std::mutex> l(g_mem);
    auto it = g_live.find((char*)p.get_context());
    if (it != g_live.end()) it->second.used.insert(s.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> l(g_mem);
    auto& m = g_memory[d < 0 ? t_device : d];
    c10::CachingDeviceAllocator::DeviceStats st;
    st.allocation[0] = m.blocks;
    st.allocated_bytes[0] = m.allocated;
    st.requested_bytes[0] = m.allocated;
    st.active_bytes[0] = m.active;
    st.reserved_bytes[0] = m.reserved;
    st.num_alloc_retries = m.retries;
    st.num_ooms = m.ooms;
    return st;
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> l(g_mem);
    auto& m = g_memory[d < 0 ? t_device : d];
    for (auto* s : {&m.allocated, &m.active, &m.reserved, &m.blocks}) s->reset_accumulated();
    m.retries = m.ooms = 0;
  }
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> l(g_mem);
    auto& m = g_memory[d < 0 ? t_device : d];
    for (auto* s : {&m.allocated, &m.active, &m.reserved, &m.blocks}) s->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard<std::mutex> l(g_mem);
    size_t total = g_total ? size_t(g_total) : ARENA;
    return {total - g_memory[d < 0 ? t_device : d].reserved.current, total};
  }
};
static DevAlloc g_dev_alloc;

// ---- guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device d) const override {
    auto o = t_device;
    setDevice(d);
    return Device(static_type, o);
  }
  Device getDevice() const override { return Device(static_type, t_device); }
  void setDevice(Device d) const override {
    if (d.index() >= 0) {
      TORCH_CHECK(d.index() < n_devices(), "no such device");
      t_device = d.index();
    }
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  Stream getStream(Device d) const override {
    auto i = d.index() < 0 ? t_device : d.index();
    return make(i, t_stream[i]);
  }
  Stream getDefaultStream(Device d) const override {
    return make(d.index() < 0 ? t_device : d.index(), 0);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return new_stream(d.index()); }
  Stream getNewStream(Device d, int) const override { return new_stream(d.index()); }
  Stream exchangeStream(Stream s) const override {
    auto d = s.device_index();
    auto o = t_stream[d];
    t_stream[d] = s.id();
    return make(d, o);
  }
  void* getStreamNativeHandle(const Stream s) const override { return &impl_of(s); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override {
    delete (std::shared_ptr<Event>*)e;
  }
  void record(void** e, const Stream& s, const DeviceIndex d,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(d == -1 || d == s.device_index(), "event of another device");
    auto& st = impl_of(s);
    if (!*e) {
      auto n = new std::shared_ptr<Event>(std::make_shared<Event>());
      (*n)->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
      (*n)->device = s.device_index();
      *e = n;
    }
    record_on(st, *(std::shared_ptr<Event>*)*e);
  }
  void block(void* ev, const Stream& s) const override {
    if (!ev) return;
    auto e = *(std::shared_ptr<Event>*)ev;
    auto& st = impl_of(s);
    uint64_t v;
    {
      std::lock_guard<std::mutex> h(g_hb);
      std::lock_guard<std::mutex> l(e->m);
      v = e->recorded;
      tick(st);
      join(st.vc, e->vc);
    }
    if (v) st.wait_event(e, v);
  }
  bool queryEvent(void* ev) const override {
    if (!ev) return true;
    auto e = *(std::shared_ptr<Event>*)ev;
    bool done;
    VC vc;
    {
      std::lock_guard<std::mutex> l(e->m);
      done = e->completed >= e->recorded;
      vc = e->vc;
    }
    if (done) {
      std::lock_guard<std::mutex> h(g_hb);
      join(g_host, vc);
    }
    return done;
  }
  void synchronizeEvent(void* ev) const override {
    if (!ev) return;
    auto e = *(std::shared_ptr<Event>*)ev;
    uint64_t v;
    VC vc;
    {
      std::lock_guard<std::mutex> l(e->m);
      v = e->recorded;
      vc = e->vc;
    }
    e->wait(v);
    {
      std::lock_guard<std::mutex> h(g_hb);
      join(g_host, vc);
    }
    raise_error();
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before calculating elapsed time.");
    auto x = *(std::shared_ptr<Event>*)a, y = *(std::shared_ptr<Event>*)b;
    TORCH_CHECK(x->timing && y->timing, "events without enable_timing");
    std::scoped_lock l(x->m, y->m);
    TORCH_CHECK(x->completed >= x->recorded && y->completed >= y->recorded, "events not completed");
    return std::chrono::duration<double, std::milli>(y->at - x->at).count();
  }
  DeviceIndex deviceCount() const noexcept override { return n_devices(); }
  bool queryStream(const Stream& s) const override { return impl_of(s).query(); }
  void synchronizeStream(const Stream& s) const override {
    note_sync("stream.synchronize");
    impl_of(s).synchronize();
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    std::vector<StreamImpl*> all;
    {
      std::lock_guard<std::mutex> l(g_streams_m);
      for (auto& [k, s] : g_streams)
        if (d < 0 || k.first == d) all.push_back(s);
    }
    for (auto s : all) s->synchronize();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    g_dev_alloc.recordStream(p, s);
  }
};

struct GenImpl : at::CPUGeneratorImpl {
  explicit GenImpl(DeviceIndex i) {
    device_ = Device(c10::DeviceType::PrivateUse1, i);
    key_set_ = DispatchKeySet(DispatchKey::PrivateUse1);
  }
};

// ---- tensors seen by kernels
struct Ref {
  bool defined = false, device = false, wrapped = false;
  char* p = nullptr;
  char* guarded = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  Tensor host;
  Tensor cpu() const {
    if (!defined) return Tensor();
    if (!device) return host;
    Tensor t = at::from_blob(p, sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU));
    return t;
  }
  std::pair<char*, char*> range() const {
    int64_t n = 1, last = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
      n *= sizes[i];
      last += (sizes[i] - 1) * strides[i];
    }
    if (!n || !guarded) return {nullptr, nullptr};
    return {guarded, guarded + (last + 1) * c10::elementSize(dtype)};
  }
};
static Ref ref_of(const Tensor& t, bool mutated) {
  Ref r;
  if (!t.defined()) return r;
  r.defined = true;
  r.dtype = t.scalar_type();
  r.wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
  if (t.is_privateuseone()) {
    r.device = true;
    r.sizes = t.sizes().vec();
    r.strides = t.strides().vec();
    if (t.numel() && t.storage().data_ptr().get()) {
      r.guarded = (char*)t.storage().data_ptr().get() + t.storage_offset() * t.itemsize();
      r.p = real(r.guarded);
    }
  } else {
    TORCH_CHECK(t.is_cpu(), "a tensor on ", t.device());
    TORCH_CHECK(!mutated,
                "Expected all tensors to be on the same device: the output is on the CPU, an input "
                "on the simulated device");
    at::AutoDispatchBelowADInplaceOrView g;
    r.host = t.detach().clone();
    if (r.wrapped) r.host.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return r;
}
static Tensor meta_of(const Tensor& t) {
  if (!t.defined()) return t;
  if (!t.is_privateuseone()) return t;
  Tensor m = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    m.unsafeGetTensorImpl()->set_wrapped_number(true);
  return m;
}
static IValue map_tensors(const IValue& v, const std::function<Tensor(const Tensor&)>& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor t : v.toTensorList()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor> t : v.toOptionalTensorList())
      out.push_back(t.has_value() && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  return v;
}
static void each_tensor(const IValue& v, const std::function<void(const Tensor&)>& f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor());
  } else if (v.isTensorList()) {
    for (const Tensor t : v.toTensorList())
      if (t.defined()) f(t);
  } else if (v.isOptionalTensorList()) {
    for (const std::optional<Tensor> t : v.toOptionalTensorList())
      if (t.has_value() && t->defined()) f(*t);
  }
}

// A kernel costs each byte of its arguments once for a read and once for a write, and the flops of
// its products.
static double bytes_of(const Ref& r) {
  double n = r.defined && r.device ? c10::elementSize(r.dtype) : 0;
  // An expanded dimension counts once.
  for (size_t i = 0; i < r.sizes.size(); i++)
    if (r.strides[i] || !r.sizes[i]) n *= r.sizes[i];
  return n;
}
static double numel_of(const Ref& r) {
  double n = 1;
  for (auto k : r.sizes) n *= k;
  return n;
}
static double flops_of(const std::string& op, const std::vector<const Ref*>& in, const Ref& out) {
  auto has = [&](const char* part) { return op.find(part) != std::string::npos; };
  auto product = [&](size_t a, size_t b) {
    return in.size() > b && !in[b]->sizes.empty() ? 2 * numel_of(*in[a]) * in[b]->sizes.back() : 0;
  };
  if (op == "aten::mm" || op == "aten::bmm") return product(0, 1);
  if (op == "aten::addmm" || op == "aten::_addmm_activation" || op == "aten::baddbmm" ||
      op == "aten::baddbmm_" || op == "aten::addmm_" || op == "aten::addbmm")
    return product(1, 2);
  bool back = has("backward");
  // Each is (batch, heads, length, width); the backward has five products in place of two.
  if (has("_scaled_dot_product")) {
    size_t q = back ? 1 : 0;
    if (in.size() < q + 3 || in[q]->sizes.size() != 4) return 0;
    double rows = numel_of(*in[q]) / in[q]->sizes[3], length = in[q + 1]->sizes[2],
           widths = in[q]->sizes[3] + in[q + 2]->sizes[3];
    return 2 * rows * length * widths * (back ? 2.5 : 1);
  }
  if (has("convolution") || has("conv2d") || has("conv3d") || has("conv_transpose")) {
    // The larger side, where the convolution is not transposed.
    const Ref &x = back ? *in[0] : out, &w = *in[back ? 2 : 1];
    if (x.sizes.empty() || w.sizes.empty()) return 0;
    return 2 * numel_of(x) * numel_of(w) / w.sizes[0] * (back ? 2 : 1);
  }
  return 0;
}

static void launch(StreamImpl& s, const std::string& name,
                   const std::vector<std::pair<Ref, bool>>& uses, std::function<void()> f,
                   Work w = {}) {
  raise_error();
  {
    std::lock_guard<std::mutex> h(g_hb);
    auto at = tick(s);
    if (g_check)
      for (auto& [r, w] : uses)
        if (r.defined && r.device) {
          auto [lo, hi] = r.range();
          access(s.vc, s.agent, at, lo, hi, w, name);
        }
  }
  s.enqueue(
      [f = std::move(f)] {
        at::AutoDispatchBelowADInplaceOrView g;
        f();
      },
      w);
  print_stack();
}

static Tensor empty_on(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype,
                       Device d) {
  c10::DeviceGuard g(d);
  return at::detail::empty_strided_generic(size, stride, &g_dev_alloc,
                                           DispatchKeySet(DispatchKey::PrivateUse1), dtype);
}

// These read no more of their first argument than they return.
static const std::unordered_set<std::string> GATHERS = {
    "aten::embedding", "aten::index_select",     "aten::gather",
    "aten::index",     "aten::nll_loss_forward", "aten::nll_loss2d_forward"};
// These do not read their outputs.
static const std::unordered_set<std::string> WRITES = {
    "aten::zero_",      "aten::fill_",   "aten::normal_",        "aten::uniform_",
    "aten::bernoulli_", "aten::random_", "aten::_foreach_zero_", "aten::_foreach_copy_"};
static const std::unordered_set<std::string> SYNCS = {"aten::nonzero",
                                                      "aten::masked_select",
                                                      "aten::equal",
                                                      "aten::is_nonzero",
                                                      "aten::_unique2",
                                                      "aten::unique_consecutive",
                                                      "aten::_local_scalar_dense",
                                                      "aten::bincount",
                                                      "aten::repeat_interleave.Tensor"};
static const std::unordered_set<std::string> CPU_INDEX = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
    "aten::index.Tensor_out"};
static std::unordered_set<std::string> g_no_meta;

// The answers of meta kernels, many of which are Python, by all the arguments that they look at.
struct Shapes {
  std::vector<IValue> results;
  std::vector<std::vector<int64_t>> outs;
};
static std::mutex g_memo_m;
static std::unordered_map<std::string, std::shared_ptr<Shapes>> g_memo;
// An empty key: this answer is not to be kept.
static std::string memo_key(const std::string& name, const torch::jit::Stack& stack, size_t begin) {
  std::string key = name + char(at::get_default_dtype_as_scalartype());
  bool ok = true;
  auto put = [&](int64_t v) { key.append((const char*)&v, sizeof v); };
  auto tensor = [&](const Tensor& t) {
    if (!t.defined()) {
      key += 'u';
      return;
    }
    bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
    if (!t.is_privateuseone() && !wrapped) ok = false;
    key += 't';
    key += char(t.scalar_type());
    key += char(wrapped);
    put(t.dim());
    for (auto k : t.sizes()) put(k);
    for (auto k : t.strides()) put(k);
  };
  for (size_t i = begin; i < stack.size() && ok; i++) {
    const IValue& v = stack[i];
    if (v.isTensor()) tensor(v.toTensor());
    else if (v.isTensorList()) {
      key += 'l';
      for (const Tensor t : v.toTensorList()) tensor(t);
      key += 'e';
    } else if (v.isOptionalTensorList()) ok = false;
    else if (v.isNone()) key += 'n';
    else if (v.isInt()) {
      key += 'i';
      put(v.toInt());
    } else if (v.isBool()) {
      key += 'b';
      put(v.toBool());
    } else if (v.isDouble()) {
      key += 'd';
      double d = v.toDouble();
      key.append((const char*)&d, sizeof d);
    } else if (v.isString()) {
      key += 's';
      key += v.toStringRef();
      key += char(0);
    } else if (v.isDevice()) {
      key += 'v';
      key += char(v.toDevice().type());
    } else if (v.isIntList()) {
      key += 'I';
      for (int64_t k : v.toIntList()) put(k);
      key += 'e';
    } else if (v.isBoolList()) {
      key += 'B';
      for (bool k : v.toBoolList()) put(k);
      key += 'e';
    } else ok = false;
  }
  return ok ? key : std::string();
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& args = schema.arguments();
  const auto& rets = schema.returns();
  const size_t n = args.size(), begin = stack->size() - n;
  const std::string name = c10::toString(schema.operator_name());
  // devices
  Device device(c10::DeviceType::PrivateUse1, -1);
  bool has_generator = false;
  for (size_t i = 0; i < n; i++) {
    const IValue& v = (*stack)[begin + i];
    each_tensor(v, [&](const Tensor& t) {
      if (t.is_privateuseone()) {
        TORCH_CHECK(device.index() < 0 || device == t.device() || t.dim() == 0,
                    "Expected all tensors to be on the same device, but found ", device, " and ",
                    t.device(), " in ", name);
        if (device.index() < 0 || t.dim() > 0) device = t.device();
      } else {
        TORCH_CHECK(t.is_cpu() && (t.dim() == 0 || CPU_INDEX.count(schema.name())),
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, the simulated one and ",
                    t.device(), " in ", name);
      }
    });
    if (v.isDevice() && device.index() < 0 && v.toDevice().is_privateuseone())
      device = v.toDevice();
    if (v.isGenerator()) has_generator = true;
  }
  if (device.index() < 0) device = Device(c10::DeviceType::PrivateUse1, t_device);
  c10::DeviceGuard guard(device);
  auto& s = current(device.index());

  bool tensor_rets_only = true, fresh = false, out_args = false;
  for (auto& r : rets) {
    bool tensor = r.type()->isSubtypeOf(*c10::TensorType::get()) ||
                  r.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensor) tensor_rets_only = false;
    auto al = r.alias_info();
    if (al == nullptr) fresh = true;
    else TORCH_CHECK(al->isWrite(), "a view operator without a kernel: ", name);
  }
  for (auto& a : args)
    if (a.is_out()) out_args = true;
  bool random = has_generator || op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < n; i++)
    if (args[i].name() == "dropout_p" && (*stack)[begin + i].isDouble() &&
        (*stack)[begin + i].toDouble() == 0)
      random = false;
  bool sync = random || !tensor_rets_only || SYNCS.count(name) || SYNCS.count(schema.name());
  {
    std::lock_guard<std::mutex> l(g_names);
    if (g_no_meta.count(name)) sync = true;
  }

  // what the outputs look like
  std::vector<IValue> metas;
  bool meta_failed = false;
  auto resize = [&](size_t i, at::IntArrayRef want) {
    const IValue& v = (*stack)[begin + i];
    if (v.isTensor() && v.toTensor().defined() && v.toTensor().sizes() != want)
      v.toTensor().resize_(want);
  };
  std::string key = !sync && (fresh || out_args) ? memo_key(name, *stack, begin) : std::string();
  // The CPU's kernels keep mean and deviation in the dtype of the input, if the weight has it, too;
  // their backward asks for that.
  auto as_on_the_cpu = [&](std::vector<IValue>& results) {
    if (schema.name() != "aten::native_layer_norm" && schema.name() != "aten::native_group_norm")
      return;
    Tensor x, weight;
    for (size_t i = 0; i < n; i++) {
      const IValue& v = (*stack)[begin + i];
      if (v.isTensor() && args[i].name() == "input") x = v.toTensor();
      if (v.isTensor() && args[i].name() == "weight") weight = v.toTensor();
    }
    if (x.defined() && (!weight.defined() || weight.scalar_type() == x.scalar_type()) &&
        results.size() == 3)
      for (size_t r : {1, 2})
        if (results[r].isTensor()) results[r] = results[r].toTensor().to(x.scalar_type());
  };
  std::shared_ptr<Shapes> known;
  if (!key.empty()) {
    std::lock_guard<std::mutex> l(g_memo_m);
    auto it = g_memo.find(key);
    if (it != g_memo.end()) known = it->second;
  }
  if (known) {
    metas = known->results;
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
      if (args[i].is_out()) resize(i, known->outs[k++]);
  } else if (!sync && (fresh || out_args)) {
    torch::jit::Stack ms;
    for (size_t i = 0; i < n; i++) {
      const IValue& v = (*stack)[begin + i];
      if (v.isDevice()) ms.emplace_back(Device(at::kMeta));
      else ms.push_back(map_tensors(v, meta_of));
    }
    std::vector<IValue> outs_before;
    for (size_t i = 0; i < n; i++)
      if (args[i].is_out()) outs_before.push_back(ms[i]);
    try {
      at::AutoDispatchBelowADInplaceOrView g;
      op.callBoxed(&ms);
      metas.assign(ms.end() - rets.size(), ms.end());
      as_on_the_cpu(metas);
      auto shapes = std::make_shared<Shapes>(Shapes{metas, {}});
      for (auto& o : outs_before)
        shapes->outs.push_back(o.isTensor() && o.toTensor().defined() ? o.toTensor().sizes().vec()
                                                                      : std::vector<int64_t>());
      if (!key.empty()) {
        std::lock_guard<std::mutex> l(g_memo_m);
        if (g_memo.size() > 20000) g_memo.clear();
        g_memo[key] = shapes;
      }
      size_t k = 0;
      for (size_t i = 0; i < n; i++)
        if (args[i].is_out()) resize(i, shapes->outs[k++]);
    } catch (const std::exception& e) {
      meta_failed = true;
      sync = true;
    }
  }

  // arguments as kernels see them
  struct Arg {
    IValue plain;
    bool tensors = false, list = false, optional = false, out = false;
    std::vector<Ref> refs;
  };
  auto held = std::make_shared<std::vector<Arg>>(n);
  std::vector<std::pair<Ref, bool>> uses;
  for (size_t i = 0; i < n; i++) {
    const IValue& v = (*stack)[begin + i];
    Arg& a = (*held)[i];
    auto al = args[i].alias_info();
    bool w = al != nullptr && al->isWrite();
    auto add = [&](const Tensor& t) {
      a.refs.push_back(ref_of(t, w));
      uses.push_back({a.refs.back(), w});
    };
    if (v.isTensor()) {
      a.tensors = true;
      a.out = args[i].is_out() && v.toTensor().defined();
      add(v.toTensor());
    } else if (v.isTensorList()) {
      a.tensors = a.list = true;
      for (const Tensor t : v.toTensorList()) add(t);
    } else if (v.isOptionalTensorList()) {
      a.tensors = a.list = a.optional = true;
      for (const std::optional<Tensor> t : v.toOptionalTensorList())
        add(t.has_value() ? *t : Tensor());
    } else if (v.isDevice()) a.plain = IValue(Device(at::kCPU));
    else if (v.isGenerator()) a.plain = IValue();  // the CPU's default one
    else a.plain = v;
  }
  auto rebuild = [held]() {
    torch::jit::Stack st;
    for (auto& a : *held) {
      if (!a.tensors) st.push_back(a.plain);
      else if (a.out) st.emplace_back(at::empty({0}, at::TensorOptions().dtype(a.refs[0].dtype)));
      else if (!a.list) st.emplace_back(a.refs[0].cpu());
      else if (!a.optional) {
        c10::List<Tensor> l;
        for (auto& r : a.refs) l.push_back(r.cpu());
        st.emplace_back(std::move(l));
      } else {
        c10::List<std::optional<Tensor>> l;
        for (auto& r : a.refs)
          l.push_back(r.defined ? std::optional<Tensor>(r.cpu()) : std::nullopt);
        st.emplace_back(std::move(l));
      }
    }
    return st;
  };
  auto work_of = [&](const std::vector<const Ref*>& results) -> Work {
    if (!g_cost) return {};
    static const Ref none;
    const std::string& kernel = schema.name();
    std::vector<const Ref*> in;
    double bytes = 0, divides = 0;
    for (size_t i = 0; i < n; i++)
      if (args[i].name() == "grad_scale")
        for (auto& r : (*held)[i].refs) divides += r.defined;
    for (size_t i = 0; i < n; i++) {
      const Arg& a = (*held)[i];
      in.push_back(a.refs.empty() ? &none : &a.refs[0]);
      auto al = args[i].alias_info();
      bool both = al && al->isWrite() && !a.out && !WRITES.count(kernel) &&
                  (divides || args[i].name() != "grads");
      if (i || !GATHERS.count(kernel))
        for (auto& r : a.refs) bytes += bytes_of(r) * (both ? 2 : 1);
    }
    for (auto* r : results) bytes += bytes_of(*r) * (GATHERS.count(kernel) ? 2 : 1);
    const Ref* out = !results.empty() ? results[0] : &none;
    for (auto& a : *held)
      if (a.out) out = &a.refs[0];
    return work(KERNELS, bytes, flops_of(kernel, in, *out));
  };
  auto originals = std::vector<IValue>(stack->begin() + begin, stack->end());
  auto result_alias = [&](size_t r) -> IValue {
    auto al = rets[r].alias_info();
    for (size_t i = 0; i < n; i++) {
      auto b = args[i].alias_info();
      if (b && b->isWrite() && *b == *al) return originals[i];
    }
    TORCH_CHECK(false, "no alias in ", name);
  };

  if (sync) {
    bool counted = SYNCS.count(name) || SYNCS.count(schema.name()) || !tensor_rets_only;
    if (counted) note_sync(name.c_str());
    {
      std::lock_guard<std::mutex> l(g_names);
      g_sync_ops[name + (random ? " (random)" : "")]++;
    }
    s.synchronize();
    torch::jit::Stack st = rebuild();
    std::vector<std::pair<Tensor, Tensor>> resized;  // out= arguments, which run on a fresh tensor
    for (size_t i = 0; i < n; i++)
      if (args[i].is_out() && originals[i].isTensor()) {
        Tensor f = at::empty({0}, st[i].toTensor().options());
        resized.push_back({originals[i].toTensor(), f});
        st[i] = f;
      }
    {
      std::lock_guard<std::mutex> h(g_hb);
      auto at = tick(s);
      if (g_check)
        for (auto& [r, w] : uses)
          if (r.defined && r.device) {
            auto [lo, hi] = r.range();
            access(s.vc, s.agent, at, lo, hi, w, name);
          }
      join(g_host, s.vc);
    }
    {
      at::AutoDispatchBelowADInplaceOrView g;
      op.callBoxed(&st);
    }
    if (g_cost) s.enqueue([] {}, work_of({}));
    if (meta_failed) {
      std::lock_guard<std::mutex> l(g_names);
      g_no_meta.insert(name);
    }
    auto up = [&](const Tensor& c) -> Tensor {
      if (!c.defined()) return c;
      Tensor o = empty_on(c.sizes(), c.strides(), c.scalar_type(), device);
      Ref r = ref_of(o, true);
      Tensor own = c.detach().clone();
      launch(s, name, {{r, true}}, [r, own] { r.cpu().copy_(own); }, work(KERNELS, bytes_of(r)));
      return o;
    };
    std::vector<IValue> out;
    for (size_t r = 0; r < rets.size(); r++) {
      const IValue& v = st[st.size() - rets.size() + r];
      if (rets[r].alias_info()) out.push_back(result_alias(r));
      else if (v.isTensor() || v.isTensorList()) out.push_back(map_tensors(v, up));
      else out.push_back(v);
    }
    for (auto& [o, f] : resized) {
      if (o.sizes() != f.sizes()) o.resize_(f.sizes());
      Ref r = ref_of(o, true);
      Tensor own = f;
      launch(s, name, {{r, true}}, [r, own] { r.cpu().copy_(own); });
    }
    stack->erase(stack->begin() + begin, stack->end());
    for (auto& v : out) stack->push_back(std::move(v));
    return;
  }

  g_async_ops++;
  {
    std::lock_guard<std::mutex> l(g_names);
    g_async_names[name]++;
  }
  auto outs = std::make_shared<std::vector<std::pair<size_t, std::vector<Ref>>>>();
  std::vector<IValue> out;
  for (size_t r = 0; r < rets.size(); r++) {
    if (rets[r].alias_info()) {
      out.push_back(result_alias(r));
      continue;
    }
    std::vector<Ref> refs;
    out.push_back(map_tensors(metas[r], [&](const Tensor& m) -> Tensor {
      if (!m.defined()) {
        refs.emplace_back();
        return m;
      }
      Tensor o = empty_on(m.sizes(), m.strides(), m.scalar_type(), device);
      refs.push_back(ref_of(o, true));
      uses.push_back({refs.back(), true});
      return o;
    }));
    outs->push_back({r, refs});
  }
  const size_t nr = rets.size();
  std::vector<const Ref*> results;
  for (auto& [r, refs] : *outs)
    for (auto& f : refs) results.push_back(&f);
  launch(
      s, name, uses,
      [rebuild, held, op, outs, nr, name] {
        if (!g_arithmetic) return;
        torch::jit::Stack st = rebuild();
        std::vector<std::pair<Ref, Tensor>> written;
        for (size_t i = 0; i < held->size(); i++)
          if ((*held)[i].out) written.push_back({(*held)[i].refs[0], st[i].toTensor()});
        op.callBoxed(&st);
        for (auto& [f, t] : written) {
          TORCH_CHECK(t.sizes() == at::IntArrayRef(f.sizes), name, ": shape ", t.sizes(),
                      " on the CPU, ", at::IntArrayRef(f.sizes), " of its out=");
          f.cpu().copy_(t);
        }
        for (auto& [r, refs] : *outs) {
          const IValue& v = st[st.size() - nr + r];
          size_t k = 0;
          auto put = [&](const Tensor& t) {
            TORCH_CHECK(k < refs.size(), "number of outputs of ", name);
            const Ref& f = refs[k++];
            if (!f.defined || !t.defined()) return;
            TORCH_CHECK(t.sizes() == at::IntArrayRef(f.sizes), name, ": shape ", t.sizes(),
                        " on the CPU, ", at::IntArrayRef(f.sizes), " by its meta kernel");
            TORCH_CHECK(t.scalar_type() == f.dtype ||
                            (t.is_floating_point() && c10::isFloatingType(f.dtype)),
                        name, ": dtype ", t.scalar_type(), " on the CPU, ", f.dtype,
                        " by its meta kernel");
            f.cpu().copy_(t);
          };
          if (v.isTensor()) put(v.toTensor());
          else if (v.isTensorList())
            for (const Tensor t : v.toTensorList()) put(t);
        }
      },
      work_of(results));
  stack->erase(stack->begin() + begin, stack->end());
  for (auto& v : out) stack->push_back(std::move(v));
}

// ---- copies
static Ref host_ref(const Tensor& t) {  // host memory that the copy reads or writes when it runs
  Ref r;
  r.defined = true;
  r.device = true;
  r.dtype = t.scalar_type();
  r.sizes = t.sizes().vec();
  r.strides = t.strides().vec();
  if (t.numel()) {
    r.p = (char*)t.data_ptr();
    r.guarded = r.p;
  }
  return r;
}
static bool dense(const Tensor& t) { return t.is_non_overlapping_and_dense(); }
static void copy_data(const Ref& from, const Ref& to) {
  if (g_arithmetic) to.cpu().copy_(from.cpu());
}

// Pinned memory at `p` is in use until the copy has ended.
static void pinned_copy(StreamImpl& s, const char* name, const Ref& from, const Ref& to,
                        const void* p, const Work& w) {
  pin_use(p, 1);
  launch(
      s, name, {{from, false}, {to, true}},
      [from, to, p] {
        copy_data(from, to);
        pin_use(p, -1);
      },
      w);
}
// Pageable memory has a quarter of the bandwidth.
static Work pageable(int engine, const Ref& r) { return work(engine, 4 * bytes_of(r)); }

static Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  TORCH_CHECK(self.defined() && dst.defined(), "undefined tensor");
  if (dst.numel() == 0) return dst;
  Tensor src = self.sizes() == dst.sizes() ? self : self.expand_as(dst);
  g_copies++;
  const auto since = Clock::now();
  at::AutoDispatchBelowADInplaceOrView below;
  if (src.is_privateuseone() && dst.is_privateuseone()) {
    auto& a = current(src.get_device());
    Ref x = ref_of(src, false), y = ref_of(dst, true);
    if (src.device() == dst.device()) {
      launch(
          a, "copy_", {{x, false}, {y, true}}, [x, y] { copy_data(x, y); },
          work(KERNELS, bytes_of(x) + bytes_of(y)));
    } else {
      auto& b = current(dst.get_device());
      auto ready = std::make_shared<Event>(), done = std::make_shared<Event>();
      auto order = [](StreamImpl& from, StreamImpl& to, std::shared_ptr<Event> e) {
        record_on(from, e);
        {
          std::lock_guard<std::mutex> h(g_hb);
          tick(to);
          join(to.vc, e->vc);
        }
        to.wait_event(e, 1);
      };
      order(b, a, ready);
      launch(
          a, "copy_ (between devices)", {{x, false}, {y, true}}, [x, y] { copy_data(x, y); },
          work(KERNELS, bytes_of(x) + bytes_of(y)));
      order(a, b, done);
    }
    return dst;
  }
  if (dst.is_privateuseone()) {  // up
    c10::DeviceGuard g(dst.device());
    auto& s = current(dst.get_device());
    bool direct =
        src.scalar_type() == dst.scalar_type() && src.strides() == dst.strides() && dense(src);
    Ref y = ref_of(dst, true);
    if (direct && is_pinned(src.data_ptr())) {
      if (!non_blocking) note_sync("blocking copy to the device");
      pinned_copy(s, "copy up from pinned", host_ref(src), y, src.data_ptr(), work(UP, bytes_of(y)));
      if (!non_blocking) s.synchronize();
      return dst;
    }
    // CUDA has read pageable memory, or memory to be converted, by the time that the call returns.
    if (!non_blocking) note_sync("blocking copy to the device");
    Tensor own =
        g_arithmetic ? src.detach().to(src.options().dtype(dst.scalar_type())).clone() : Tensor();
    Work w = pageable(UP, y);
    w.since = since;  // the time of the clone is a part of it
    launch(
        s, "copy up", {{y, true}},
        [own, y] {
          if (own.defined()) y.cpu().copy_(own);
        },
        w);
    if (!non_blocking) s.synchronize();
    // A driver stages smaller copies.
    else if (g_cost && bytes_of(y) > (64 << 10)) s.wait_quietly();
    return dst;
  }
  // down
  c10::DeviceGuard g(src.device());
  auto& s = current(src.get_device());
  Ref x = ref_of(src, false);
  bool direct = src.scalar_type() == dst.scalar_type() && dst.is_cpu() &&
                src.strides() == dst.strides() && dense(dst);
  if (direct && non_blocking && is_pinned(dst.data_ptr())) {
    pinned_copy(s, "copy down to pinned", x, host_ref(dst), dst.data_ptr(), work(DOWN, bytes_of(x)));
    return dst;
  }
  note_sync("blocking copy to the host");
  Tensor own = at::empty_strided(dst.sizes(), dst.strides(), dst.options().pinned_memory(false));
  bool pinned = direct && is_pinned(dst.data_ptr());
  launch(
      s, "copy down", {{x, false}},
      [x, own] {
        if (g_arithmetic) own.copy_(x.cpu());
        else own.zero_();
      },
      pinned ? work(DOWN, bytes_of(x)) : pageable(DOWN, x));
  s.synchronize();
  dst.copy_(own);
  return dst;
}

static Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout> layout, std::optional<Device> device,
                                  std::optional<bool> pin, std::optional<at::MemoryFormat> mf) {
  auto d = c10::device_or_default(device);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(d);
  return at::detail::empty_generic(size, &g_dev_alloc, DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), mf);
}
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<Device> device, std::optional<bool> pin) {
  auto d = c10::device_or_default(device);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(d);
  return at::detail::empty_strided_generic(size, stride, &g_dev_alloc,
                                           DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
static Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> off) {
  return at::cpu::as_strided_symint(self, size, stride, off);
}
static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size,
                             std::optional<at::MemoryFormat> mf) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), mf);
}
static Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size,
                            c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}
static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
static at::Scalar local_scalar_dense(const Tensor& self) {
  note_sync("_local_scalar_dense");
  auto& s = current(self.get_device());
  Ref x = ref_of(self, false);
  Tensor own = at::empty({}, self.options().device(at::kCPU));
  launch(
      s, "item", {{x, false}},
      [x, own] {
        if (g_arithmetic) own.copy_(x.cpu().reshape({}));
        else own.zero_();
      },
      work(DOWN, bytes_of(x)));
  s.synchronize();
  return own.item();
}
static Tensor& set_t(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}
static Tensor& set_s(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
static Tensor& set_so(Tensor& self, at::Storage st, int64_t off, at::IntArrayRef size,
                      at::IntArrayRef stride) {
  return at::cpu::set_(self, st, off, size, stride);
}
static Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
static Tensor unfold(const Tensor& self, int64_t d, int64_t size, int64_t step) {
  return at::native::unfold(self, d, size, step);
}
static void record_stream(Tensor& self, Stream s) {
  TORCH_CHECK(s.device_type() == c10::DeviceType::PrivateUse1,
              "record_stream: a stream of another device type");
  g_dev_alloc.recordStream(self.storage().data_ptr(), s);
}

// These have kernels of the CPU as well, under other names.
static void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}
static void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto sizes = c10::List<int64_t>({(*stack)[stack->size() - 10].toTensor().size(1)});
  stack->insert(stack->end() - 7, IValue(sizes));  // of the bias
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return n_devices() > 0; }
  DeviceIndex deviceCount() const override { return n_devices(); }
  void setCurrentDevice(DeviceIndex d) const override {
    if (d >= 0) t_device = d;
  }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto o = t_device;
    if (d >= 0) t_device = d;
    return o;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_host_alloc; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(is_device_ptr(p), "not device memory");
    std::lock_guard<std::mutex> l(g_mem);
    auto it = g_live.upper_bound((char*)p);
    TORCH_CHECK(it != g_live.begin(), "not allocated");
    return Device(c10::DeviceType::PrivateUse1, (--it)->second.device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> v;
      for (int k = 0; k < n_devices(); k++) v.push_back(at::make_generator<GenImpl>(k));
      return v;
    }();
    return all[i < 0 ? t_device : i];
  }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<GenImpl>(i < 0 ? t_device : i);
  }
  void resizePrivateUse1Bytes(const c10::Storage& st, size_t n) const override {
    c10::DeviceGuard g(st.device());
    auto fresh = g_dev_alloc.allocate(n);
    size_t keep = std::min(n, st.nbytes());
    if (keep && st.data_ptr().get()) {
      auto& s = current(st.device().index());
      char *a = real(st.data_ptr().get()), *b = real(fresh.get());
      s.enqueue(
          [a, b, keep] {
            if (g_arithmetic) memcpy(b, a, keep);
          },
          work(KERNELS, 2.0 * keep));
    }
    const_cast<c10::Storage&>(st).set_data_ptr_noswap(std::move(fresh));
    const_cast<c10::Storage&>(st).set_nbytes(n);
  }
};

static bool g_reg = [] {
  init_arena();
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &g_dev_alloc);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &g_host_alloc);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
}  // namespace sim

namespace c10 {
namespace impl {
static ::c10::impl::DeviceGuardImplRegistrar g_sim_guard(c10::DeviceType::PrivateUse1,
                                                         new sim::Guard());
}
}  // namespace c10

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty_memory_format);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("as_strided", sim::as_strided);
  m.impl("resize_", sim::resize_);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::local_scalar_dense);
  m.impl("set_.source_Tensor", sim::set_t);
  m.impl("set_.source_Storage", sim::set_s);
  m.impl("set_.source_Storage_storage_offset", sim::set_so);
  m.impl("view", sim::view);
  m.impl("unfold", sim::unfold);
  m.impl("record_stream", sim::record_stream);
  m.impl("convolution_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&sim::convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&sim::convolution_backward>());
  // Other devices have these as composites; the CPU's own kernels give the CPU's numbers.
  for (const char* name : {"native_layer_norm", "native_group_norm", "_foreach_norm.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
namespace at {
namespace autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define _KERNEL_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(_KERNEL_LOW)
#define _KERNEL_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(_KERNEL_FP32)
#define _KERNEL_FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(_KERNEL_FP32_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define _KERNEL_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(_KERNEL_PROMOTE)
}
}  // namespace autocast
}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("device_count", [] { return n_devices(); });
  m.def("get_device", [] { return int(t_device); });
  m.def("exchange_device", [](int d) {
    int o = t_device;
    if (d >= 0) {
      TORCH_CHECK(d < n_devices(), "no such device: ", d);
      t_device = d;
    }
    return d < 0 ? -1 : o;
  });
  m.def("sleep_us", [](int64_t us) {
    auto& s = current(t_device);
    s.enqueue(
        [us] {
          if (!g_cost) std::this_thread::sleep_for(std::chrono::microseconds(us));
        },
        {NO_ENGINE, us * 1e-6});
  });
  // No task may be running.
  m.def("set_cost",
        [](double up, double down, double memory, double flops, double launch, bool arithmetic) {
          g_costs = {up, down, memory, flops, launch};
          g_cost = up || down || memory || flops || launch;
          g_arithmetic = arithmetic || !g_cost;
        });
  m.def("cost_stats", [](int d, bool reset) {
    py::dict r;
    const char* names[] = {"up", "down", "kernels"};
    for (int i = 0; i < ENGINES; i++) {
      auto& e = g_engines[d][i];
      std::lock_guard<std::mutex> l(e.m);
      r[names[i]] = e.busy;
      if (reset) e.busy = 0;
    }
    r["late_us"] = int64_t(g_late_us);
    if (reset) g_late_us = 0;
    return r;
  });
  m.def("set_memory", [](size_t total) { g_total = total; });
  m.def("stream_count", [](int d) { return int(g_next[d]); });
  m.def("empty_cache", [] { g_dev_alloc.emptyCache(); }, py::call_guard<py::gil_scoped_release>());
  m.def("set_delay", [](double p0, int us0, double p1, int us1) {
    std::lock_guard<std::mutex> l(g_cfg);
    g_delay_default = {p0, us0};
    g_delay_side = {p1, us1};
  });
  m.def("set_poison", [](bool b) { g_poison = b; });
  m.def("set_strict", [](bool b) { g_strict = b; });
  m.def("set_check", [](bool b) { g_check = b; });
  m.def("set_sync_mode", [](int i) { g_sync_mode = i; });
  m.def("get_sync_mode", [] { return int(g_sync_mode); });
  m.def("seed", [](uint64_t s) { g_seed = s; });
  m.def("races", [] {
    std::lock_guard<std::mutex> h(g_hb);
    std::vector<std::tuple<std::string, uint64_t, std::string>> v;
    for (auto& [k, c] : g_races) v.push_back({k, c.first, c.second});
    return v;
  });
  m.def("clear_races", [] {
    std::lock_guard<std::mutex> h(g_hb);
    g_races.clear();
  });
  m.def("stats", [] {
    std::lock_guard<std::mutex> l(g_names);
    py::dict d;
    d["syncs"] = uint64_t(g_syncs);
    d["async_ops"] = uint64_t(g_async_ops);
    d["copies"] = uint64_t(g_copies);
    d["reused_blocks"] = uint64_t(g_reused);
    d["deferred_frees"] = uint64_t(g_deferred_n);
    size_t allocated = 0;
    uint64_t streams = 0;
    {
      std::lock_guard<std::mutex> m(g_mem);
      for (auto& m : g_memory) allocated += m.allocated.current;
    }
    for (auto& k : g_next) streams += k;
    d["sync_ops"] = g_sync_ops;
    d["async"] = g_async_names;
    d["arena"] = g_top;
    d["allocated"] = allocated;
    d["streams"] = streams;
    return d;
  });
  // The host reads any address; with device memory the process dies.
  m.def("peek", [](int64_t p) { return *(char*)p; });
}
