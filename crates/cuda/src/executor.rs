//! [`CudaExecutor`]: the phases of one program on one GPU.
//!
//! Job: allocate the plan's regions, lower every op once, choose algorithms, capture each phase in the owning thread, replay. Refuses to leave its thread
//! (streams and graphs are `!Send`) and to allocate device memory after [`Executor::prepare`].
//!
//! A phase is cut where a command touches a slot: those few commands (a column copy, the fusion's product and its gradient) are enqueued directly with the
//! slot's address, and everything between them is a captured graph. So one capture serves every slot, whichever worker made it, and no graph bakes an
//! address that travels.
//!
//! Invariants: everything of an executor runs on one stream in the order of the calls; no call but `read`, `collect` and `with_grads` waits for the device,
//! unless the ring of host data is full; each wait has a deadline.

use crate::blas::{AlgorithmTable, Blas};
use crate::command::{Command, Pointer, Work};
use crate::driver::{Buffer, DeviceHandle, Event, Graph, Pinned, Stream};
use crate::error::CudaError;
use crate::frozen::FrozenStore;
use crate::host::{bounds, narrow, widen};
use crate::lower::{Lowering, scratch_bytes};
use crate::slot::CudaSlot;
use crate::staging::{Returns, Ring};
use crate::timing::zero;
use drafthorse_graph::op::Access;
use drafthorse_graph::plan::Region;
use drafthorse_graph::{
    DType, ExecError, Executor, Fetch, HostMut, HostRef, PhaseId, Plan, Program, Role, SlotArg, Storage, TensorId,
};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How a CUDA executor runs.
#[derive(Clone)]
pub struct Options {
    /// Replay captured graphs; otherwise every command is enqueued by itself.
    pub capture: bool,
    /// Use wgmma kernels where the device has them; otherwise mma.sync everywhere.
    pub hopper: bool,
    /// Wait after every command, so that an error names its op. For finding faults.
    pub check_each: bool,
    /// Longest wait for the device.
    pub deadline: Duration,
    /// Algorithms of matrix products, shared by all executors.
    pub algorithms: Arc<AlgorithmTable>,
}

impl Default for Options {
    fn default() -> Options {
        Options { capture: true, hopper: true, check_each: false, deadline: Duration::from_secs(300), algorithms: Arc::default() }
    }
}

/// Commands that run together: captured, or enqueued with a slot's address.
struct Segment {
    commands: Range<usize>,
    touches_slot: bool,
    graph: Option<Graph>,
}

struct Phase {
    commands: Vec<Command>,
    segments: Vec<Segment>,
    access: Option<Access>,
}

/// Where a fetched tensor lies in its pinned buffer.
struct Piece {
    at: usize,
    len: usize,
    dtype: DType,
}

/// Runs programs on one GPU.
// Graphs drop before the memory whose addresses they hold.
pub struct CudaExecutor {
    phases: Vec<Phase>,
    blas: Blas,
    ring: Ring,
    returns: Returns,
    fetches: HashMap<u64, ((Pinned, Event), Vec<Piece>)>,
    next_fetch: u64,
    done: Event,
    stream: Stream,
    regions: BTreeMap<Region, Buffer>,
    places: Vec<Option<Pointer>>,
    // Held so that frozen addresses stay alive.
    frozen: Vec<Arc<Buffer>>,
    tables: Vec<Buffer>,
    scratch: Buffer,
    bounds: HashMap<TensorId, Range<i64>>,
    slot_bytes: usize,
    program: Arc<Program>,
    plan: Plan,
    device: DeviceHandle,
    store: Arc<FrozenStore>,
    options: Options,
    last_phase: String,
}

impl CudaExecutor {
    /// Plans `program`, allocates its regions (zeroed) and lowers its ops. Frozen tensors are taken from `store`.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for shapes the kernels do not cover, [`CudaError::Frozen`], [`CudaError::Memory`], or the driver's.
    pub fn new(program: Arc<Program>, store: &Arc<FrozenStore>, options: Options) -> Result<CudaExecutor, CudaError> {
        let device = Arc::clone(store.device());
        let plan = Plan::new(&program, Storage::Declared);
        let stream = Stream::new(&device)?;
        let mut regions = BTreeMap::new();
        for region in Region::ALL.into_iter().filter(|r| !matches!(r, Region::Frozen | Region::Slot)) {
            regions.insert(region, Buffer::new(&device, plan.bytes(region), region.title())?);
        }
        let (mut places, mut frozen) = (Vec::new(), Vec::new());
        for (t, tensor) in program.tensors() {
            places.push(match (tensor.role, plan.place(t)) {
                (_, None) => None,
                (Role::Frozen, Some(place)) => {
                    let buffer = store.get(&tensor.name, place.bytes)?;
                    let address = buffer.address();
                    frozen.push(buffer);
                    Some(Pointer::At(address))
                }
                (Role::Slot, Some(place)) => Some(Pointer::Slot(place.offset as u64)),
                (_, Some(place)) => Some(Pointer::At(regions[&place.region].address() + place.offset as u64)),
            });
        }
        let scratch = Buffer::new(&device, scratch_bytes(&program), "cached attention's partial sums")?;
        let hopper = options.hopper && device.is_hopper();
        let (mut phases, mut tables) = (Vec::new(), Vec::new());
        for (id, phase) in program.phases() {
            let mut lowering = Lowering::new(&program, store.kernels(), &device, &places, scratch.address(), hopper);
            for (i, node) in phase.nodes.iter().enumerate() {
                lowering.lower(i, &node.op)?;
            }
            tables.append(&mut lowering.tables);
            let segments = segments(&lowering.commands);
            phases.push(Phase { commands: lowering.commands, segments, access: program.slot_access(id) });
        }
        let deadline = options.deadline;
        let mut made = CudaExecutor {
            phases,
            blas: Blas::new(&device)?,
            ring: Ring::new(&device, deadline)?,
            returns: Returns::new(&device),
            fetches: HashMap::new(),
            next_fetch: 0,
            done: Event::new(&device, false)?,
            stream,
            regions,
            places,
            frozen,
            tables: Vec::new(),
            scratch,
            bounds: bounds(&program),
            slot_bytes: plan.bytes(Region::Slot),
            program,
            plan,
            device,
            store: Arc::clone(store),
            options,
            last_phase: "start".into(),
        };
        for region in Region::ALL {
            made.clear(region)?;
        }
        for (buffer, content) in tables {
            made.ring.upload(&made.stream, buffer.address(), content.len(), |at, room| {
                room.copy_from_slice(&content[at..at + room.len()])
            })?;
            made.tables.push(buffer);
        }
        made.stream.finish(&made.done, deadline, "the first zeroing of memory")?;
        Ok(made)
    }

    /// The plan this executor allocated.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What executors of this device share.
    pub fn store(&self) -> &Arc<FrozenStore> {
        &self.store
    }

    /// Bytes held beside the plan's regions: workspace of matrix products, tables, partial sums of cached attention.
    pub fn extra_bytes(&self) -> u64 {
        let tables: usize = self.tables.iter().map(Buffer::bytes).sum();
        (self.blas.workspace_bytes() + tables + self.scratch.bytes()) as u64
    }

    /// Products whose algorithm this executor had to time: 0 when the table had them all.
    pub fn products_timed(&self) -> usize {
        self.blas.timed
    }

    /// Commands of a phase, and the captured graphs among which they are spread: (commands, graphs, commands enqueued directly).
    pub fn launches(&self, phase: PhaseId) -> (usize, usize, usize) {
        let p = &self.phases[phase.index()];
        let direct = p.segments.iter().filter(|s| s.graph.is_none()).map(|s| s.commands.len()).sum();
        (p.commands.len(), p.segments.iter().filter(|s| s.graph.is_some()).count(), direct)
    }

    fn clear(&self, region: Region) -> Result<(), CudaError> {
        match self.regions.get(&region) {
            Some(buffer) => zero(&self.stream, buffer),
            None => Ok(()),
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.options.deadline
    }

    pub(crate) fn program(&self) -> &Arc<Program> {
        &self.program
    }

    pub(crate) fn device(&self) -> &DeviceHandle {
        &self.device
    }

    /// Command ranges of each node of a phase, in order.
    pub(crate) fn nodes(&self, phase: PhaseId) -> Vec<(usize, Range<usize>)> {
        let commands = &self.phases[phase.index()].commands;
        let mut nodes: Vec<(usize, Range<usize>)> = Vec::new();
        for (i, command) in commands.iter().enumerate() {
            match nodes.last_mut() {
                Some((node, range)) if *node == command.node => range.end = i + 1,
                _ => nodes.push((command.node, i..i + 1)),
            }
        }
        nodes
    }

    /// Enqueues some commands of a phase by themselves.
    pub(crate) fn enqueue(&self, phase: PhaseId, range: Range<usize>, slot: u64) -> Result<(), ExecError> {
        for command in &self.phases[phase.index()].commands[range] {
            let mut result = command.enqueue(&self.stream, &self.blas, slot);
            if result.is_ok() && self.options.check_each {
                result = self.stream.finish(&self.done, self.options.deadline, "one command");
            }
            result.map_err(|e| self.command_error(phase, command, e))?;
        }
        Ok(())
    }

    fn command_error(&self, phase: PhaseId, command: &Command, error: CudaError) -> ExecError {
        let phase = self.program.phase(phase);
        let mut op = phase.nodes[command.node].op.describe(&self.program);
        if let Work::Launch(launch) = &command.work {
            op = format!("{op} as {}", launch.describe());
        }
        error.at(&phase.name, &op)
    }

    fn phase_error(&self, phase: PhaseId, what: &str) -> impl Fn(CudaError) -> ExecError {
        let (phase, what) = (self.program.phase(phase).name.clone(), what.to_owned());
        move |e| e.at(&phase, &what)
    }

    /// Errors of waits carry the phase that was enqueued last.
    fn last_error(&self, what: &str) -> impl Fn(CudaError) -> ExecError + use<> {
        let (phase, what) = (self.last_phase.clone(), what.to_owned());
        move |e| e.at(&phase, &what)
    }

    /// Checks that a slot argument is what the phase needs, and gives its buffer.
    fn bound<'s>(&self, phase: PhaseId, slot: &'s SlotArg<'_, CudaSlot>) -> Result<Option<&'s CudaSlot>, ExecError> {
        let (access, buffer): (_, Option<&CudaSlot>) = match slot {
            SlotArg::None => (None, None),
            SlotArg::Read(s) => (Some(Access::Read), Some(s)),
            SlotArg::Write(s) => (Some(Access::Write), Some(s)),
        };
        let need = self.phases[phase.index()].access;
        let refuse = |what: String| ExecError::Slot { phase: self.program.phase(phase).name.clone(), what };
        if need != access {
            return Err(refuse(format!("needs slot access {need:?}, got {access:?}")));
        }
        if let Some(slot) = buffer {
            if slot.bytes() != self.slot_bytes {
                return Err(refuse(format!("needs a slot of {} bytes, got {}", self.slot_bytes, slot.bytes())));
            }
            if slot.ordinal() != self.device.ordinal() {
                let (has, at) = (slot.ordinal(), self.device.ordinal());
                return Err(refuse(format!(
                    "the slot lies on GPU {has} and this executor on GPU {at}; copies between GPUs are not built"
                )));
            }
        }
        Ok(buffer)
    }

    /// The place of a tensor in the executor's own memory.
    fn own(&self, t: TensorId, len: usize, is_float: bool, what: &str) -> Result<u64, ExecError> {
        let tensor = self.program.get(t);
        let readable = !matches!(tensor.role, Role::Frozen | Role::Slot);
        match self.places[t.index()] {
            Some(Pointer::At(at)) if readable && len == tensor.len() && is_float == tensor.dtype.is_float() => Ok(at),
            _ => Err(ExecError::HostShape {
                name: tensor.name.clone(),
                want: tensor.len(),
                dtype: if tensor.dtype.is_float() { "float" } else { "i32" },
                got: format!("{what} {len} {} elements, role {:?}", if is_float { "float" } else { "i32" }, tensor.role),
            }),
        }
    }

    fn check_bounds(&self, t: TensorId, values: &[i32]) -> Result<(), ExecError> {
        let Some(range) = self.bounds.get(&t) else { return Ok(()) };
        match values.iter().find(|&&v| !range.contains(&i64::from(v))) {
            None => Ok(()),
            Some(v) => Err(ExecError::HostShape {
                name: self.program.get(t).name.clone(),
                want: values.len(),
                dtype: "i32",
                got: format!("the index {v}, which is outside {}..{}", range.start, range.end),
            }),
        }
    }

    /// Chooses the algorithm of every product, timing those that the table lacks on random operands.
    fn choose_algorithms(&mut self) -> Result<(), ExecError> {
        let stand_in = Buffer::new(&self.device, self.slot_bytes, "a slot's stand-in while products are timed")
            .map_err(self.last_error("prepare"))?;
        self.fill(&stand_in, 1).map_err(self.last_error("prepare"))?;
        for region in [Region::Arena, Region::Step] {
            let buffer = &self.regions[&region];
            self.fill(buffer, 2 + region as u32).map_err(self.last_error("prepare"))?;
        }
        for (id, _) in self.program.phases() {
            for command in &self.phases[id.index()].commands {
                let Work::Gemm(gemm) = &command.work else { continue };
                let (table, deadline) = (&self.options.algorithms, self.options.deadline);
                let chosen = self.blas.choose(gemm.product, gemm.operands(stand_in.address()), &self.stream, table, deadline);
                if let Err(e) = chosen {
                    return Err(self.command_error(id, command, e));
                }
            }
        }
        self.stream.finish(&self.done, self.options.deadline, "the timing of products").map_err(self.last_error("prepare"))
    }

    /// Random bf16 values over a whole buffer.
    pub(crate) fn fill(&self, buffer: &Buffer, seed: u32) -> Result<(), CudaError> {
        if buffer.bytes() == 0 {
            return Ok(());
        }
        crate::timing::fill(&self.stream, self.store.kernels(), buffer, seed)
    }

    /// Runs every phase once, command by command, with all counts as the host wrote them (zero when it did not).
    fn warm_up(&mut self) -> Result<(), ExecError> {
        let phases: Vec<PhaseId> = self.program.phases().map(|(id, _)| id).collect();
        let needs_slot = phases.iter().any(|p| self.phases[p.index()].access.is_some());
        let stand_in =
            Buffer::new(&self.device, if needs_slot { self.slot_bytes } else { 0 }, "a slot's stand-in while warming up")
                .and_then(|b| zero(&self.stream, &b).map(|()| b))
                .map_err(self.last_error("prepare"))?;
        for phase in phases {
            self.enqueue(phase, 0..self.phases[phase.index()].commands.len(), stand_in.address())?;
            self.stream
                .finish(&self.done, self.options.deadline, "a phase's warm-up")
                .map_err(self.phase_error(phase, "warm-up"))?;
        }
        Ok(())
    }

    fn capture(&mut self) -> Result<(), ExecError> {
        for (id, _) in Arc::clone(&self.program).phases() {
            for i in 0..self.phases[id.index()].segments.len() {
                let segment = &self.phases[id.index()].segments[i];
                if segment.touches_slot {
                    continue;
                }
                let range = segment.commands.clone();
                let mut failed = None;
                let graph = self.stream.capture(|| {
                    for command in &self.phases[id.index()].commands[range] {
                        if let Err(e) = command.enqueue(&self.stream, &self.blas, 0) {
                            let what = e.to_string();
                            failed = Some(self.command_error(id, command, e));
                            return Err(CudaError::Call { call: "capture".into(), what });
                        }
                    }
                    Ok(())
                });
                if let Some(e) = failed {
                    return Err(e);
                }
                let graph = graph.map_err(self.phase_error(id, "capture"))?;
                self.phases[id.index()].segments[i].graph = Some(graph);
            }
        }
        self.stream.finish(&self.done, self.options.deadline, "the upload of graphs").map_err(self.last_error("prepare"))
    }
}

/// Cuts commands where they touch a slot.
fn segments(commands: &[Command]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for (i, command) in commands.iter().enumerate() {
        let touches_slot = command.touches_slot();
        match segments.last_mut() {
            Some(s) if s.touches_slot == touches_slot => s.commands.end = i + 1,
            _ => segments.push(Segment { commands: i..i + 1, touches_slot, graph: None }),
        }
    }
    segments
}

impl Executor for CudaExecutor {
    type Slot = CudaSlot;

    fn write(&mut self, t: TensorId, data: HostRef<'_>) -> Result<(), ExecError> {
        let (len, is_float) = match data {
            HostRef::F32(s) => (s.len(), true),
            HostRef::I32(s) => (s.len(), false),
        };
        let to = self.own(t, len, is_float, "a write of")?;
        let dtype = self.program.get(t).dtype;
        let failed = self.last_error("write");
        self.device.bind().map_err(&failed)?;
        let (ring, stream) = (&mut self.ring, &self.stream);
        match data {
            HostRef::F32(s) if dtype == DType::BF16 => ring.upload(stream, to, 2 * len, |at, room| {
                let from = &s[at / 2..(at + room.len()) / 2];
                room.as_chunks_mut::<2>().0.iter_mut().zip(from).for_each(|(to, &x)| *to = narrow(x).to_ne_bytes());
            }),
            HostRef::F32(s) => {
                let bytes: &[u8] = bytemuck::cast_slice(s);
                ring.upload(stream, to, bytes.len(), |at, room| room.copy_from_slice(&bytes[at..at + room.len()]))
            }
            HostRef::I32(s) => {
                self.check_bounds(t, s)?;
                let bytes: &[u8] = bytemuck::cast_slice(s);
                self.ring.upload(&self.stream, to, bytes.len(), |at, room| room.copy_from_slice(&bytes[at..at + room.len()]))
            }
        }
        .map_err(failed)
    }

    fn read(&mut self, t: TensorId, out: HostMut<'_>) -> Result<(), ExecError> {
        let (len, is_float) = match &out {
            HostMut::F32(s) => (s.len(), true),
            HostMut::I32(s) => (s.len(), false),
        };
        let from = self.own(t, len, is_float, "room for")?;
        let dtype = self.program.get(t).dtype;
        let failed = self.last_error("read");
        self.device.bind().map_err(&failed)?;
        let (stream, deadline) = (&self.stream, self.options.deadline);
        let mut take = |bytes: usize, each: &mut dyn FnMut(usize, &[u8])| self.returns.show(stream, from, bytes, deadline, each);
        match out {
            HostMut::F32(s) if dtype == DType::BF16 => take(2 * len, &mut |at, data| {
                let halves: &[u16] = bytemuck::cast_slice(data);
                s[at / 2..at / 2 + halves.len()].iter_mut().zip(halves).for_each(|(s, &h)| *s = widen(h));
            }),
            HostMut::F32(s) => {
                take(4 * len, &mut |at, data| bytemuck::cast_slice_mut::<f32, u8>(s)[at..at + data.len()].copy_from_slice(data))
            }
            HostMut::I32(s) => {
                take(4 * len, &mut |at, data| bytemuck::cast_slice_mut::<i32, u8>(s)[at..at + data.len()].copy_from_slice(data))
            }
        }
        .map_err(failed)
    }

    fn fetch(&mut self, tensors: &[TensorId]) -> Result<Fetch, ExecError> {
        let failed = self.last_error("fetch");
        self.device.bind().map_err(&failed)?;
        let (mut pieces, mut sources, mut end) = (Vec::new(), Vec::new(), 0);
        for &t in tensors {
            let tensor = self.program.get(t);
            let at = self.own(t, tensor.len(), tensor.dtype.is_float(), "a fetch of")?;
            pieces.push(Piece { at: end, len: tensor.len(), dtype: tensor.dtype });
            sources.push((end, tensor.len() * tensor.dtype.bytes(), at));
            end += (tensor.len() * tensor.dtype.bytes()).next_multiple_of(16);
        }
        let (mut buffer, event) = self.returns.take(end).map_err(&failed)?;
        for (start, bytes, from) in sources {
            self.returns.enqueue(&self.stream, &mut buffer, start..start + bytes, from).map_err(&failed)?;
        }
        self.stream.record(&event).map_err(&failed)?;
        self.next_fetch += 1;
        self.fetches.insert(self.next_fetch, ((buffer, event), pieces));
        Ok(Fetch(self.next_fetch))
    }

    fn collect(&mut self, fetch: Fetch, each: &mut dyn FnMut(usize, HostRef<'_>)) -> Result<(), ExecError> {
        let (buffer, pieces) = self.fetches.remove(&fetch.0).expect("a fetch is collected once, by the executor that started it");
        let failed = self.last_error("collect");
        self.device.bind().and_then(|()| buffer.1.wait(self.options.deadline, "results")).map_err(failed)?;
        for (i, piece) in pieces.iter().enumerate() {
            let data = &buffer.0.bytes()[piece.at..piece.at + piece.len * piece.dtype.bytes()];
            match piece.dtype {
                DType::F32 => each(i, HostRef::F32(bytemuck::cast_slice(data))),
                DType::I32 => each(i, HostRef::I32(bytemuck::cast_slice(data))),
                DType::BF16 => {
                    let wide: Vec<f32> = bytemuck::cast_slice::<u8, u16>(data).iter().map(|&h| widen(h)).collect();
                    each(i, HostRef::F32(&wide));
                }
            }
        }
        self.returns.give(buffer);
        Ok(())
    }

    fn run(&mut self, phase: PhaseId, slot: SlotArg<'_, CudaSlot>) -> Result<(), ExecError> {
        let slot = self.bound(phase, &slot)?;
        self.device.bind().map_err(self.phase_error(phase, "run"))?;
        self.last_phase.clone_from(&self.program.phase(phase).name);
        let segments = &self.phases[phase.index()].segments;
        let last_touch = segments.iter().rposition(|s| s.touches_slot);
        let mut turn = None;
        for (i, segment) in segments.iter().enumerate() {
            if let (true, None, Some(slot)) = (segment.touches_slot, &turn, slot) {
                turn = Some(slot.turn(&self.stream).map_err(self.phase_error(phase, "wait for the slot"))?);
            }
            match &segment.graph {
                Some(graph) => self.stream.replay(graph).map_err(self.phase_error(phase, "replay"))?,
                None => self.enqueue(phase, segment.commands.clone(), slot.map_or(0, CudaSlot::address))?,
            }
            if Some(i) == last_touch
                && let Some(turn) = turn.take()
            {
                turn.end(&self.stream).map_err(self.phase_error(phase, "hand the slot on"))?;
            }
        }
        Ok(())
    }

    /// Content of tensors that the host wrote (weights, state, inputs) is kept; everything else is zero afterwards.
    fn prepare(&mut self) -> Result<(), ExecError> {
        self.device.bind().map_err(self.last_error("prepare"))?;
        // First launches load code, so one thread at a time warms up, too.
        let device = Arc::clone(&self.device);
        let _alone = device.alone();
        self.choose_algorithms()?;
        let working = [Region::Arena, Region::Step, Region::Grad, Region::Output];
        let clear = |made: &CudaExecutor| working.iter().try_for_each(|&r| made.clear(r)).map_err(made.last_error("prepare"));
        clear(self)?;
        self.warm_up()?;
        clear(self)?;
        if self.options.capture {
            self.capture()?;
        }
        self.stream.finish(&self.done, self.options.deadline, "preparation").map_err(self.last_error("prepare"))
    }

    fn new_slot(&self) -> Result<CudaSlot, ExecError> {
        CudaSlot::new(&self.device, self.slot_bytes).map_err(self.last_error("slot"))
    }

    fn with_grads(&mut self, f: &mut dyn FnMut(&mut [f32])) -> Result<(), ExecError> {
        let failed = self.last_error("gradients");
        self.device.bind().map_err(&failed)?;
        let (at, bytes) = (self.regions[&Region::Grad].address(), self.plan.bytes(Region::Grad));
        let mut grads = vec![0.0f32; bytes / 4];
        let host = bytemuck::cast_slice_mut::<f32, u8>(&mut grads);
        self.returns
            .show(&self.stream, at, bytes, self.options.deadline, &mut |from, data| {
                host[from..from + data.len()].copy_from_slice(data);
            })
            .map_err(&failed)?;
        f(&mut grads);
        let host: &[u8] = bytemuck::cast_slice(&grads);
        self.ring
            .upload(&self.stream, at, bytes, |from, room| room.copy_from_slice(&host[from..from + room.len()]))
            .map_err(failed)
    }

    fn held_bytes(&self) -> u64 {
        let own: usize = self.regions.values().map(Buffer::bytes).sum();
        let frozen: usize = self.frozen.iter().map(|b| b.bytes().next_multiple_of(drafthorse_graph::plan::ALIGN)).sum();
        (own + frozen) as u64 + self.extra_bytes()
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Copies under way read and write pinned memory that is about to go; after a device fault there is nothing left to wait for.
        let _ = self.device.bind().and_then(|()| self.stream.finish(&self.done, self.options.deadline, "the end of an executor"));
    }
}
