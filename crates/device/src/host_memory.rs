//! Memory of the host that holds blocks of keys and values.

use std::ops::DerefMut;

/// Bytes at an address that never changes while they live, usable from any thread.
pub trait HostMemory: DerefMut<Target = [u8]> + Send {}

impl<T: DerefMut<Target = [u8]> + Send> HostMemory for T {}
