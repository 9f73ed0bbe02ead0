//! Weights in memory.

use std::collections::BTreeMap;

use folio_formats::{Format, TensorView, WeightSource};

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub format: Format,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn f32(shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(bytes.len(), 4 * shape.iter().product::<usize>(), "bytes of shape {shape:?}");
        Self { format: Format::F32, shape: shape.to_vec(), bytes }
    }
}

impl From<TensorView<'_>> for Tensor {
    fn from(view: TensorView<'_>) -> Self {
        Self { format: view.format, shape: view.shape, bytes: view.bytes.to_vec() }
    }
}

/// Tensors by name.
#[derive(Clone, Debug, Default)]
pub struct Weights(pub BTreeMap<String, Tensor>);

impl Weights {
    pub fn put(&mut self, name: &str, tensor: Tensor) {
        self.0.insert(name.to_owned(), tensor);
    }

    pub fn put_f32(&mut self, name: &str, shape: &[usize], values: impl IntoIterator<Item = f32>) {
        self.put(name, Tensor::f32(shape, values));
    }

    /// The tensor of that name, which must be there.
    pub fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// The tensor of that name, which must be there.
    pub fn get_mut(&mut self, name: &str) -> &mut Tensor {
        self.0.get_mut(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// The values of the tensor of that name, which must be there.
    pub fn values(&self, name: &str) -> Vec<f32> {
        self.require(name).and_then(|view| view.to_f32()).unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Makes tensors until `missing` names no other.
    pub fn complete(
        mut self,
        mut missing: impl FnMut(&Self) -> Option<(String, Vec<usize>)>,
        mut make: impl FnMut(&mut Self, &str, &[usize]),
    ) -> Self {
        while let Some((name, shape)) = missing(&self) {
            make(&mut self, &name, &shape);
            assert!(self.0.contains_key(&name), "{name} is still missing");
        }
        self
    }
}

impl WeightSource for Weights {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, Tensor { format, shape, bytes }) = self.0.get_key_value(name)?;
        Some(TensorView { name, format: *format, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_made() {
        let wanted = [("b", vec![2, 3]), ("a", vec![1])];
        let missing = |weights: &Weights| {
            let (name, shape) = wanted.iter().find(|(name, _)| !weights.contains(name))?;
            Some(((*name).to_owned(), shape.clone()))
        };
        let zeros = |weights: &mut Weights, name: &str, shape: &[usize]| {
            weights.put_f32(name, shape, vec![0.5; shape.iter().product()]);
        };
        let weights = Weights::default().complete(missing, zeros);
        assert_eq!(weights.names(), ["a", "b"]);
        let view = weights.require("b").expect("made");
        assert_eq!((view.shape.as_slice(), view.to_f32().expect("f32")), (&[2, 3][..], vec![0.5; 6]));
        assert_eq!(&Tensor::from(view), weights.get("b"));
    }
}
