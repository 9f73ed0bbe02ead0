//! The memory and the work of a render, counted by the operations that make values, in a table of
//! the thread that renders.
//!
//! A string or a container that an operation made is kept here too, beside the template, and
//! released once only this table holds it; so the count is of live values, and a template may build
//! its text piece by piece. Containers know their depth: none becomes so deep that showing,
//! comparing or dropping it would overflow the stack.

use std::{cell::RefCell, collections::HashMap, sync::Arc};

use indexmap::IndexMap;
use minijinja::{
    Error, ErrorKind, Value,
    value::{Tuple, ValueKind},
};

type Map = IndexMap<Value, Value>;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of all values that are alive.
    pub live: usize,
    /// Bytes written, to whatever captures them included.
    pub emitted: usize,
    /// Bytes and values handled by operations, whatever became of them.
    pub work: usize,
}

/// How deep containers may lie in each other: deeper than any JSON that is read.
const MAX_DEPTH: u16 = 256;

/// A string this short lies inside its value.
const INLINE_BYTES: usize = 22;
/// Bytes of a value in a list, and of an entry in a map.
const VALUE_BYTES: usize = 24;
const ENTRY_BYTES: usize = 96;
/// Bytes of any value beside its content, its entry in this table included.
const OVERHEAD_BYTES: usize = 112;
/// Below this nothing is looked through for what has died.
const LEAST_SWEEP_BYTES: usize = 1 << 20;

enum Kept {
    Text(Arc<str>),
    List(Arc<Vec<Value>>),
    Tuple(Arc<Tuple>),
    Map(Arc<Map>),
}

impl Kept {
    fn address(&self) -> usize {
        match self {
            Kept::Text(kept) => Arc::as_ptr(kept).addr(),
            Kept::List(kept) => Arc::as_ptr(kept).addr(),
            Kept::Tuple(kept) => Arc::as_ptr(kept).addr(),
            Kept::Map(kept) => Arc::as_ptr(kept).addr(),
        }
    }

    fn is_dead(&self) -> bool {
        1 == match self {
            Kept::Text(kept) => Arc::strong_count(kept),
            Kept::List(kept) => Arc::strong_count(kept),
            Kept::Tuple(kept) => Arc::strong_count(kept),
            Kept::Map(kept) => Arc::strong_count(kept),
        }
    }
}

struct Ledger {
    limits: Limits,
    /// In the order they were made, with their bytes: what a container holds lies before it, and
    /// outlives it here, so that dropping it drops nothing else.
    kept: Vec<(Kept, usize)>,
    /// How deep what is kept is, by its address, which nothing else can have as long as it is kept.
    depths: HashMap<usize, u16>,
    charged: usize,
    sweep_at: usize,
    emitted: usize,
    worked: usize,
    /// Left sides of products whose right sides are being evaluated.
    factors: Vec<Value>,
}

thread_local! {
    static CURRENT: RefCell<Option<Ledger>> = const { RefCell::new(None) };
}

/// Renders under these limits. Outside of it nothing is counted and all is allowed.
pub fn run<T>(limits: Limits, render: impl FnOnce() -> T) -> T {
    struct Close;
    impl Drop for Close {
        fn drop(&mut self) {
            let ledger = CURRENT.with_borrow_mut(Option::take);
            // The newest first, in the order in which they contain each other.
            if let Some(mut ledger) = ledger {
                while ledger.kept.pop().is_some() {}
            }
        }
    }
    let ledger = Ledger {
        limits,
        kept: Vec::new(),
        depths: HashMap::new(),
        charged: 0,
        sweep_at: LEAST_SWEEP_BYTES.min(limits.live),
        emitted: 0,
        worked: 0,
        factors: Vec::new(),
    };
    CURRENT.set(Some(ledger));
    let _close = Close;
    render()
}

fn with<T: Default>(act: impl FnOnce(&mut Ledger) -> Result<T, Error>) -> Result<T, Error> {
    CURRENT.with_borrow_mut(|ledger| ledger.as_mut().map_or_else(|| Ok(T::default()), act))
}

fn refuse(detail: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

/// Counts what an operation has made, and gives it back: as a list, where it was something that
/// makes its items anew each time.
pub fn hold(value: Value) -> Result<Value, Error> {
    if CURRENT.with_borrow(Option::is_none) {
        return Ok(value);
    }
    let is_list = value.downcast_object_ref::<Vec<Value>>().is_some() || value.is_tuple();
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) || is_list {
        with(|ledger| ledger.register(&value, 0).map(drop))?;
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        let item = item?;
        with(|ledger| {
            ledger.register(&item, 0)?;
            ledger.make_room((items.len() + 1) * 2 * VALUE_BYTES)
        })?;
        items.push(item);
    }
    let list = Value::from(items);
    with(|ledger| ledger.register(&list, 0).map(drop))?;
    Ok(list)
}

/// Checks that `bytes` more may be taken.
pub fn make_room(bytes: usize) -> Result<(), Error> {
    with(|ledger| ledger.make_room(bytes))
}

/// Bytes that are never given back before the end.
pub fn pin(bytes: usize) -> Result<(), Error> {
    with(|ledger| ledger.charge(bytes))
}

/// Bytes or values that an operation goes through.
pub fn spend(work: usize) -> Result<(), Error> {
    with(|ledger| ledger.spend(work))
}

/// Bytes written. The error's kind is that of an output that is full.
pub fn emit(bytes: usize) -> Result<(), Error> {
    with(|ledger| {
        ledger.emitted = ledger.emitted.saturating_add(bytes);
        let is_full = ledger.emitted > ledger.limits.emitted;
        let full = || Error::new(ErrorKind::WriteFailure, "the output limit was reached");
        if is_full { Err(full()) } else { ledger.spend(bytes) }
    })
}

pub fn push_factor(value: Value) {
    CURRENT.with_borrow_mut(|ledger| ledger.iter_mut().for_each(|ledger| ledger.factors.push(value.clone())));
}

pub fn pop_factor() -> Option<Value> {
    CURRENT.with_borrow_mut(|ledger| ledger.as_mut()?.factors.pop())
}

pub fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

impl Ledger {
    /// How deep it is. All that it holds is kept before itself.
    fn register(&mut self, value: &Value, above: u16) -> Result<u16, Error> {
        if let Some(text) = value.as_str() {
            if text.len() > INLINE_BYTES && value.kind() == ValueKind::String {
                let bytes = text.len();
                self.keep(Kept::Text(Arc::try_from(value.clone())?), bytes, 0)?;
            }
            return Ok(0);
        }
        let (kept, bytes) = if let Some(list) = value.downcast_object::<Vec<Value>>() {
            let bytes = list.capacity() * VALUE_BYTES;
            (Kept::List(list), bytes)
        } else if let Some(tuple) = value.downcast_object::<Tuple>() {
            let bytes = tuple.len() * VALUE_BYTES;
            (Kept::Tuple(tuple), bytes)
        } else if let Some(map) = value.downcast_object::<Map>() {
            let bytes = map.capacity() * ENTRY_BYTES;
            (Kept::Map(map), bytes)
        } else {
            // All other values have a fixed size, or were counted when they were made.
            return self.look_into(value, above);
        };
        if let Some(&depth) = self.depths.get(&kept.address()) {
            return Ok(depth);
        }
        let depth = match &kept {
            Kept::List(list) => self.deepest(list.iter(), above)?,
            Kept::Tuple(tuple) => self.deepest(tuple.iter(), above)?,
            Kept::Map(map) => self.deepest(map.iter().flat_map(|(key, value)| [key, value]), above)?,
            Kept::Text(_) => 0,
        } + 1;
        self.keep(kept, bytes, depth)?;
        Ok(depth)
    }

    /// A namespace and other maps that are no plain ones.
    fn look_into(&mut self, value: &Value, above: u16) -> Result<u16, Error> {
        if value.kind() != ValueKind::Map {
            return Ok(0);
        }
        let mut depth = 0;
        for key in value.try_iter()? {
            let item = value.get_item(&key)?;
            depth = depth.max(self.deepest([&key, &item].into_iter(), above)?);
        }
        Ok(depth + 1)
    }

    fn deepest<'a>(&mut self, items: impl Iterator<Item = &'a Value>, above: u16) -> Result<u16, Error> {
        let mut depth = 0;
        for item in items {
            self.spend(1)?;
            // It is the one thing that changes, and could come to hold itself.
            if is_namespace(item) {
                return Err(refuse("a namespace cannot be part of another value".into()));
            }
            let too_deep = above >= MAX_DEPTH;
            depth = depth.max(if too_deep { MAX_DEPTH } else { self.register(item, above + 1)? });
            if depth >= MAX_DEPTH {
                return Err(refuse(format!("the template nests values more than {MAX_DEPTH} deep")));
            }
        }
        Ok(depth)
    }

    fn keep(&mut self, kept: Kept, bytes: usize, depth: u16) -> Result<(), Error> {
        let address = kept.address();
        if self.depths.contains_key(&address) {
            return Ok(());
        }
        self.spend(bytes)?;
        let bytes = bytes + OVERHEAD_BYTES;
        self.depths.insert(address, depth);
        self.kept.push((kept, bytes));
        self.charge(bytes)
    }

    fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        self.charged = self.charged.saturating_add(bytes);
        if self.charged > self.sweep_at {
            self.sweep()?;
        }
        self.make_room(0)
    }

    fn make_room(&mut self, bytes: usize) -> Result<(), Error> {
        let fits = |ledger: &Self| ledger.charged.saturating_add(bytes) <= ledger.limits.live;
        if !fits(self) {
            self.sweep()?;
        }
        let live = self.limits.live;
        if fits(self) { Ok(()) } else { Err(refuse(format!("the template holds more than {live} bytes at once"))) }
    }

    fn spend(&mut self, work: usize) -> Result<(), Error> {
        self.worked = self.worked.saturating_add(work);
        let limit = self.limits.work;
        if self.worked <= limit {
            Ok(())
        } else {
            Err(refuse(format!("the template has handled more than {limit} bytes")))
        }
    }

    /// Gives back what only this table holds; the newest first, as that may free what is older.
    fn sweep(&mut self) -> Result<(), Error> {
        self.spend(16 * self.kept.len())?;
        let Self { kept, depths, charged, .. } = self;
        kept.reverse();
        kept.retain(|(kept, bytes)| {
            let is_dead = kept.is_dead();
            if is_dead {
                depths.remove(&kept.address());
                *charged = charged.saturating_sub(*bytes);
            }
            !is_dead
        });
        kept.reverse();
        self.sweep_at = (2 * self.charged).clamp(LEAST_SWEEP_BYTES, self.limits.live.max(LEAST_SWEEP_BYTES));
        Ok(())
    }
}
