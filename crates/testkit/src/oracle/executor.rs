//! An [`Executor`] made of the oracles: slow, independent of the real ones, with every uninitialised element poisoned.
//!
//! Job: prove the op suite and other tests of programs without a real executor. Refuses speed. Invariants: floats start as NaN
//! and integers as `i32::MIN`; a phase tensor is forgotten when its phase ends, as recycled memory would be.

use super::{Rounding, Value, Values, round_to, run_phase};
use crate::op_suite::FrozenData;
use drafthorse_graph::{Access, DType, ExecError, Executor, Fetch, HostMut, HostRef, PhaseId, Program, Role, SlotArg, TensorId};
use std::collections::HashMap;
use std::sync::Arc;

/// See the module. Values are rounded to declared dtypes after every op.
#[derive(Debug)]
pub struct OracleExecutor {
    program: Arc<Program>,
    values: Values,
    /// Copies that are under way, by number of the fetch.
    fetches: HashMap<u64, Vec<HostCopy>>,
    next_fetch: u64,
}

#[derive(Debug)]
enum HostCopy {
    Float(Vec<f32>),
    Int(Vec<i32>),
}

impl OracleExecutor {
    /// An executor of `program` with the content of its frozen tensors.
    ///
    /// # Panics
    /// When a frozen tensor has no content or content of another length.
    pub fn new(program: Arc<Program>, frozen: HashMap<TensorId, FrozenData>) -> Self {
        let mut values = Values::new();
        for (id, tensor) in program.tensors() {
            let value = match (tensor.role, tensor.dtype) {
                (Role::Phase | Role::Slot, _) => continue,
                (Role::Frozen, dtype) => {
                    let FrozenData::F32(data) = frozen.get(&id).unwrap_or_else(|| panic!("no content for `{}`", tensor.name));
                    assert_eq!(data.len(), tensor.len(), "content of `{}`", tensor.name);
                    Value::Float(data.iter().map(|&x| round_to(dtype, f64::from(x))).collect())
                }
                (_, DType::I32) => Value::Int(vec![i32::MIN; tensor.len()]),
                _ => Value::Float(vec![f64::NAN; tensor.len()]),
            };
            values.insert(id, value);
        }
        OracleExecutor { program, values, fetches: HashMap::new(), next_fetch: 0 }
    }

    fn host_shape(&self, t: TensorId, got: String) -> ExecError {
        let tensor = self.program.get(t);
        let dtype = match tensor.dtype {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
        };
        ExecError::HostShape { name: tensor.name.clone(), want: tensor.len(), dtype, got }
    }

    fn slot_error(&self, phase: PhaseId, what: &str) -> ExecError {
        ExecError::Slot { phase: self.program.phase(phase).name.clone(), what: what.to_owned() }
    }
}

impl Executor for OracleExecutor {
    type Slot = Vec<f64>;

    fn write(&mut self, t: TensorId, data: HostRef<'_>) -> Result<(), ExecError> {
        let tensor = self.program.get(t);
        assert!(!matches!(tensor.role, Role::Frozen | Role::Slot), "`{}` is not written by the host", tensor.name);
        let value = match (data, tensor.dtype) {
            (HostRef::I32(v), DType::I32) => Value::Int(v.to_vec()),
            (HostRef::F32(v), DType::F32 | DType::BF16) => {
                Value::Float(v.iter().map(|&x| round_to(tensor.dtype, f64::from(x))).collect())
            }
            (HostRef::I32(v), _) => return Err(self.host_shape(t, format!("{} integers", v.len()))),
            (HostRef::F32(v), _) => return Err(self.host_shape(t, format!("{} floats", v.len()))),
        };
        if value.len() != tensor.len() {
            return Err(self.host_shape(t, format!("{} elements", value.len())));
        }
        self.values.insert(t, value);
        Ok(())
    }

    fn read(&mut self, t: TensorId, out: HostMut<'_>) -> Result<(), ExecError> {
        match (self.values.get(&t), out) {
            (Some(Value::Float(v)), HostMut::F32(out)) if v.len() == out.len() => {
                out.iter_mut().zip(v).for_each(|(o, &v)| *o = v as f32);
                Ok(())
            }
            (Some(Value::Int(v)), HostMut::I32(out)) if v.len() == out.len() => {
                out.copy_from_slice(v);
                Ok(())
            }
            (None, _) => Err(self.host_shape(t, "a read of a tensor that lives inside a phase".to_owned())),
            (Some(_), HostMut::F32(out)) => Err(self.host_shape(t, format!("room for {} floats", out.len()))),
            (Some(_), HostMut::I32(out)) => Err(self.host_shape(t, format!("room for {} integers", out.len()))),
        }
    }

    fn fetch(&mut self, tensors: &[TensorId]) -> Result<Fetch, ExecError> {
        let mut copies = Vec::new();
        for &t in tensors {
            copies.push(match self.values.get(&t) {
                Some(Value::Float(v)) => HostCopy::Float(v.iter().map(|&x| x as f32).collect()),
                Some(Value::Int(v)) => HostCopy::Int(v.clone()),
                None => return Err(self.host_shape(t, "a fetch of a tensor that lives inside a phase".to_owned())),
            });
        }
        self.next_fetch += 1;
        self.fetches.insert(self.next_fetch, copies);
        Ok(Fetch(self.next_fetch))
    }

    fn collect(&mut self, fetch: Fetch, each: &mut dyn FnMut(usize, HostRef<'_>)) -> Result<(), ExecError> {
        let copies = self.fetches.remove(&fetch.0).expect("a fetch is collected once, by the executor that started it");
        for (i, copy) in copies.iter().enumerate() {
            match copy {
                HostCopy::Float(v) => each(i, HostRef::F32(v)),
                HostCopy::Int(v) => each(i, HostRef::I32(v)),
            }
        }
        Ok(())
    }

    fn prepare(&mut self) -> Result<(), ExecError> {
        Ok(())
    }

    fn run(&mut self, phase: PhaseId, slot: SlotArg<'_, Vec<f64>>) -> Result<(), ExecError> {
        let program = Arc::clone(&self.program);
        let slot_tensor = program.of_role(Role::Slot).first().copied();
        let bound = match (program.slot_access(phase), &slot) {
            (None, SlotArg::None) => None,
            (Some(Access::Read), SlotArg::Read(s)) => Some((*s).clone()),
            (Some(Access::Write), SlotArg::Write(s)) => Some((**s).clone()),
            (None, _) => return Err(self.slot_error(phase, "touches no slot, got one")),
            (Some(_), _) => return Err(self.slot_error(phase, "needs a slot of the right access")),
        };
        if let (Some(t), Some(content)) = (slot_tensor, bound) {
            if content.len() != program.get(t).len() {
                return Err(self.slot_error(phase, "slot of another size"));
            }
            self.values.insert(t, Value::Float(content));
        }
        run_phase(&program, phase, &mut self.values, Rounding::Declared);
        if let (Some(Value::Float(content)), SlotArg::Write(s)) = (slot_tensor.and_then(|t| self.values.remove(&t)), slot) {
            *s = content;
        }
        self.values.retain(|&t, _| program.get(t).role != Role::Phase);
        Ok(())
    }

    fn new_slot(&self) -> Result<Vec<f64>, ExecError> {
        let len = self.program.of_role(Role::Slot).iter().map(|&t| self.program.get(t).len()).sum();
        Ok(vec![f64::NAN; len])
    }

    fn with_grads(&mut self, f: &mut dyn FnMut(&mut [f32])) -> Result<(), ExecError> {
        let grads = self.program.of_role(Role::Grad);
        let mut all: Vec<f32> = grads.iter().flat_map(|t| self.values[t].floats().iter().map(|&v| v as f32)).collect();
        f(&mut all);
        let mut rest = all.as_slice();
        for t in grads {
            let (mine, later) = rest.split_at(self.program.get(t).len());
            self.values.insert(t, Value::Float(mine.iter().map(|&v| f64::from(v)).collect()));
            rest = later;
        }
        Ok(())
    }

    fn held_bytes(&self) -> u64 {
        self.values.values().map(|v| 8 * v.len() as u64).sum()
    }
}
