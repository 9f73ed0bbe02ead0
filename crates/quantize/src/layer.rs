//! One layer on its way to codes: its matrices as numbers, their inputs, and the results.

use std::collections::HashMap;

use folio_formats::{Format, Matrix, TensorView, quant};
use folio_model::{LayerSites, OpenModel, Site, SiteKind, StoredLinear};

use crate::overlay::Stored;
use crate::{Error, GptqOptions, Hessian, Method, Options, Quantized, Result, Target, gptq, rtn};

/// A layer's tensors after quantization.
#[derive(Default)]
pub(crate) struct Coded {
    /// Quantized matrices by their full names.
    pub quantized: HashMap<String, Quantized>,
    /// Plain tensors that differ from the source's.
    pub changed: HashMap<String, Stored>,
}

impl Coded {
    /// All tensors that differ from the source, in a form that a decoder can read: codes become the
    /// nearest bf16 of their values, which is finer than the step between them.
    pub fn decoded(&self) -> Result<HashMap<String, Stored>> {
        let mut all = self.changed.clone();
        for (name, coded) in &self.quantized {
            let mut values = vec![0.0; coded.cols];
            let mut bytes = Vec::with_capacity(2 * coded.rows * coded.cols);
            for row in 0..coded.rows {
                coded.read_row(row, &mut values);
                bytes.extend(quant::encode(Format::BF16, &values)?);
            }
            let shape = vec![coded.rows, coded.cols];
            all.insert(name.clone(), Stored { format: Format::BF16, shape, bytes });
        }
        Ok(all)
    }
}

pub(crate) fn weight_name(linear: &StoredLinear) -> String {
    format!("{}.weight", linear.stem)
}

/// A matrix of the source as numbers.
pub(crate) fn read(model: &OpenModel, linear: &StoredLinear) -> Result<Vec<f32>> {
    let name = weight_name(linear);
    let view = model.weights.require(&name)?;
    let shape = vec![linear.rows, linear.cols];
    if view.shape != shape {
        let family = model.spec.family;
        return Err(folio_model::Error::TensorShape { name, family, expected: shape, found: view.shape }.into());
    }
    let values = read_view(&view)?;
    model.weights.release(&name);
    Ok(values)
}

pub(crate) fn read_view(view: &TensorView<'_>) -> Result<Vec<f32>> {
    let matrix: Matrix<'_> = view.matrix()?;
    let mut values = vec![0.0; matrix.num_rows() * matrix.cols()];
    for (row, values) in values.chunks_exact_mut(matrix.cols().max(1)).enumerate() {
        matrix.read_row(row, values);
    }
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(values),
        false => Err(Error::NotFinite { name: view.name.to_owned() }),
    }
}

/// Values in the source's format, or in bf16 if that was quantized.
pub(crate) fn store(view: &TensorView<'_>, values: &[f32]) -> Result<Stored> {
    let format = match view.format {
        format @ (Format::F32 | Format::F16 | Format::BF16) => format,
        _ => Format::BF16,
    };
    Ok(Stored { format, shape: view.shape.clone(), bytes: quant::encode(format, values)? })
}

/// Whether a matrix becomes codes.
pub(crate) fn is_coded(options: &Options, site: &Site, linear: &StoredLinear) -> bool {
    !matches!(site.kind, SiteKind::Router | SiteKind::SharedSwitch) && !options.keeps(&linear.stem)
}

/// Rounding and GPTQ: every matrix by itself. `hessians` has one per site, or none if no inputs
/// were collected.
pub(crate) fn code(
    model: &OpenModel,
    sites: &LayerSites,
    hessians: &[Hessian],
    options: &Options,
    step: &mut dyn FnMut(f32),
) -> Result<Coded> {
    let mut coded = Coded::default();
    for (number, site) in sites.sites.iter().enumerate() {
        step(number as f32 / sites.sites.len() as f32);
        let linears: Vec<&StoredLinear> = site.linears.iter().filter(|l| is_coded(options, site, l)).collect();
        if linears.is_empty() {
            continue;
        }
        let coder = Coder::new(options, hessians.get(number));
        for linear in linears {
            let name = weight_name(linear);
            options.target.check(&name, linear.cols)?;
            coded.quantized.insert(name, coder.code(read(model, linear)?, linear.cols));
        }
    }
    Ok(coded)
}

/// Quantizes the matrices that read one input.
pub(crate) struct Coder<'a> {
    options: &'a Options,
    factor: Option<gptq::Factor>,
    outliers: Vec<u32>,
}

impl<'a> Coder<'a> {
    pub fn new(options: &'a Options, hessian: Option<&Hessian>) -> Self {
        let keeps_outliers = options.target == Target::LlmInt8;
        let factor = match (options.method, hessian) {
            (Method::Gptq, Some(hessian)) if !keeps_outliers => {
                Some(gptq::Factor::new(hessian, &options.gptq, options.threads))
            }
            _ => None,
        };
        let outliers = match hessian {
            Some(hessian) if keeps_outliers => outliers(hessian, options.outlier_threshold),
            _ => Vec::new(),
        };
        Self { options, factor, outliers }
    }

    pub fn code(&self, weights: Vec<f32>, cols: usize) -> Quantized {
        let Options { target, threads, gptq, .. } = self.options;
        let gptq: &GptqOptions = gptq;
        match &self.factor {
            Some(factor) => gptq::quantize(*target, &weights, factor, gptq, *threads),
            None if self.outliers.is_empty() => rtn::quantize(*target, &weights, cols, *threads),
            None => rtn::quantize_around(*target, weights, cols, self.outliers.clone(), *threads),
        }
    }
}

/// Columns that reach the threshold, largest first until an eighth of all is taken; returned in
/// ascending order.
fn outliers(hessian: &Hessian, threshold: f32) -> Vec<u32> {
    let mut columns: Vec<u32> =
        (0..hessian.size as u32).filter(|column| hessian.max_abs[*column as usize] >= threshold).collect();
    columns.sort_by(|a, b| hessian.max_abs[*b as usize].total_cmp(&hessian.max_abs[*a as usize]).then(a.cmp(b)));
    columns.truncate(hessian.size / 8);
    columns.sort_unstable();
    columns
}

/// Rows that an expert must have received for its own sums to be trusted.
const FEW_ROWS: u64 = 128;

/// Experts with few rows take the sums over all rows of the layer.
pub(crate) fn fill_in_experts(sites: &LayerSites, hessians: &mut [Hessian]) {
    let kinds: [fn(SiteKind) -> bool; 2] =
        [|kind| matches!(kind, SiteKind::ExpertGateUp(_)), |kind| matches!(kind, SiteKind::ExpertDown(_))];
    for is_kind in kinds {
        let members: Vec<usize> = (0..hessians.len()).filter(|at| is_kind(sites.sites[*at].kind)).collect();
        if members.iter().all(|at| hessians[*at].rows >= FEW_ROWS) {
            continue;
        }
        let mut all = Hessian::new(hessians[members[0]].size);
        members.iter().for_each(|at| all.merge(&hessians[*at]));
        for at in members {
            if hessians[at].rows < FEW_ROWS {
                hessians[at] = all.clone();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_columns_are_outliers() {
        let mut hessian = Hessian::new(16);
        (hessian.max_abs[3], hessian.max_abs[9], hessian.max_abs[12]) = (7.0, 60.0, 6.0);
        assert_eq!(outliers(&hessian, 6.0), [3, 9], "an eighth of 16 columns");
        assert_eq!(outliers(&hessian, 50.0), [9]);
        assert!(outliers(&hessian, 100.0).is_empty());
    }

    #[test]
    fn experts_that_saw_little_borrow() {
        let site = |kind| Site { kind, linears: Vec::new() };
        let sites = vec![site(SiteKind::Router), site(SiteKind::ExpertGateUp(0)), site(SiteKind::ExpertGateUp(1))];
        let sites = LayerSites { sites, norm_before_attention: None, norm_before_ffn: None };
        let of = |rows: usize| Hessian::of_rows(&vec![1.0; 2 * rows], 2);
        let mut hessians = vec![of(300), of(250), of(50)];
        fill_in_experts(&sites, &mut hessians);
        assert_eq!(hessians.iter().map(|h| h.rows).collect::<Vec<_>>(), [300, 250, 300]);
        assert_eq!(hessians[2].values, of(300).values);
    }
}
