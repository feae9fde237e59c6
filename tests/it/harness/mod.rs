//! What the tests stand on. Helpers return errors, the tests themselves assert.

pub(crate) mod client;
pub(crate) mod gateway;
pub(crate) mod library;
pub(crate) mod load;
pub(crate) mod play;
pub(crate) mod proxy;
pub(crate) mod publisher;
pub(crate) mod receiver;
pub(crate) mod scene;
pub(crate) mod stores;
pub(crate) mod wait;
