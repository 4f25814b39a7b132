/* A libnvidia-ml.so.1 without a GPU: the functions of nvml.h that the launcher calls, with their true signatures.
 *
 * The file named by FAKE_NVML says how the GPUs are, one "key value" per line: "gpus 2", "gpu1.ecc 3". It is read at each
 * call, so that a test can change it while a job runs. What the file does not mention is healthy; a number that begins
 * with "!" is the error code of the call ("gpu0.memory !15"). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef struct gpu *nvmlDevice_t;
typedef struct set *nvmlEventSet_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;
typedef struct {
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
} nvmlGpuFabricInfo_t;

enum { OK = 0, NOT_SUPPORTED = 3, INVALID = 2, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
static const unsigned long long GIB = 1ull << 30;

static int find(const char *key, char *value, size_t size) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], name[128], text[128];
    int found = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%127s %127[^\n]", name, text) == 2 && !strcmp(name, key)) {
            snprintf(value, size, "%s", text);
            found = 1;
        }
    if (file) fclose(file);
    return found;
}

static nvmlReturn_t number(const char *key, unsigned long long standard, unsigned long long *value) {
    char text[128];
    *value = standard;
    if (!find(key, text, sizeof text)) return OK;
    if (text[0] == '!') return atoi(text + 1);
    *value = strtoull(text, NULL, 0);
    return OK;
}

static unsigned index_of(nvmlDevice_t device) { return (unsigned)(uintptr_t)device - 1; }

static nvmlReturn_t of(nvmlDevice_t device, const char *what, unsigned long long standard, unsigned long long *value) {
    char key[128];
    snprintf(key, sizeof key, "gpu%u.%s", index_of(device), what);
    return number(key, standard, value);
}

#define NUMBER(function, what, standard)                                \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *value) {       \
        unsigned long long wide;                                        \
        nvmlReturn_t code = of(device, what, standard, &wide);          \
        *value = (unsigned)wide;                                        \
        return code;                                                    \
    }

NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "pages_pending", 0)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", 1)
NUMBER(nvmlDeviceGetPerformanceState, "pstate", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_most_width", 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_most_generation", 5)

nvmlReturn_t nvmlInit_v2(void) {
    unsigned long long code;
    number("init", 0, &code);
    return (int)code;
}
nvmlReturn_t nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return snprintf(text, size, "580.65.06") < (int)size ? OK : INSUFFICIENT_SIZE;
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    unsigned long long wide;
    nvmlReturn_t code = number("gpus", 2, &wide);
    *count = (unsigned)wide;
    return code;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    unsigned count;
    unsigned long long code;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count) return INVALID;
    *device = (nvmlDevice_t)(uintptr_t)(index + 1);
    of(*device, "handle", 0, &code);
    return (int)code;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *part) {
    (void)device, (void)index, (void)part;
    return NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned size) {
    char key[32];
    snprintf(key, sizeof key, "gpu%u.name", index_of(device));
    if (!find(key, text, size)) snprintf(text, size, "NVIDIA H100 80GB HBM3");
    return OK;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned size) {
    snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", 0xa0 + index_of(device));
    return OK;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x18 + index_of(device);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:00.0", pci->domain, pci->bus);
    return OK;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t code = of(device, "memory", 80 * GIB, &memory->total);
    if (code) return code;
    of(device, "used", GIB / 2, &memory->used);
    memory->free = memory->total - memory->used;
    return OK;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *use) {
    unsigned long long wide;
    nvmlReturn_t code = of(device, "utilization", 0, &wide);
    use->gpu = (unsigned)wide, use->memory = 0;
    return code;
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *degrees) {
    unsigned long long wide;
    nvmlReturn_t code = of(device, "temperature", 33, &wide);
    *degrees = (unsigned)wide;
    return sensor ? INVALID : code;
}
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return of(device, "clocks", 1, reasons); /* 1: idle */
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int since, unsigned long long *count) {
    return kind != 1 ? INVALID : of(device, since ? "ecc_lifetime" : "ecc", 0, count);
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                       unsigned *failed) {
    unsigned long long rows, waits, spent;
    nvmlReturn_t code = of(device, "rows", 0, &rows);
    of(device, "rows_pending", 0, &waits);
    of(device, "rows_failed", 0, &spent);
    *corrected = 0, *uncorrected = (unsigned)rows, *pending = (unsigned)waits, *failed = (unsigned)spent;
    return code;
}
nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, int cause, unsigned *count, unsigned long long *addresses) {
    unsigned long long pages;
    nvmlReturn_t code = of(device, cause ? "pages" : "pages_corrected", 0, &pages);
    (void)addresses;
    if (code) return code;
    *count = (unsigned)pages;
    return pages ? INSUFFICIENT_SIZE : OK;
}

/* --- NVLink: as many links per GPU as "links" says, to a switch or to the GPUs in turn --- */
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    unsigned long long links, down;
    of(device, "links", 0, &links);
    of(device, "links_down", 0, &down);
    if (link >= links) return links ? INVALID : NOT_SUPPORTED;
    *active = link >= down;
    return OK;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, unsigned *type) {
    unsigned long long wide;
    (void)link;
    of(device, "to_switch", 1, &wide);
    *type = wide ? 2 : 0;
    return OK;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci) {
    unsigned type;
    unsigned long long peer;
    nvmlDeviceGetNvLinkRemoteDeviceType(device, link, &type);
    of(device, "peer", index_of(device) ^ 1, &peer);
    memset(pci, 0, sizeof *pci);
    pci->bus = type == 2 ? 0xc0 : 0x18 + (unsigned)peer;
    return OK;
}
nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, int counter, unsigned long long *count) {
    char what[32];
    snprintf(what, sizeof what, "link%u.errors%d", link, counter);
    return of(device, what, 0, count);
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *fabric) {
    unsigned long long state, clique, cluster;
    memset(fabric, 0, sizeof *fabric);
    nvmlReturn_t code = of(device, "fabric", 0, &state);
    of(device, "clique", 0, &clique);
    of(device, "cluster", 0, &cluster);
    fabric->state = (unsigned char)state, fabric->cliqueId = (unsigned)clique;
    fabric->clusterUuid[0] = (unsigned char)cluster;
    return code;
}

/* --- programs and events --- */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *found) {
    unsigned long long pid, bytes;
    of(device, "pid", 0, &pid);
    of(device, "pid_memory", GIB, &bytes);
    if (*count < (pid ? 1u : 0u)) return INSUFFICIENT_SIZE;
    *count = pid ? 1 : 0;
    if (pid) {
        memset(found, 0, sizeof *found);
        found->pid = (unsigned)pid, found->usedGpuMemory = bytes;
    }
    return OK;
}
static unsigned long long reported;
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    *set = (nvmlEventSet_t)(uintptr_t)0xe0;
    return OK;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    return device && types == 8 && set == (nvmlEventSet_t)(uintptr_t)0xe0 ? OK : INVALID;
}
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *event, unsigned milliseconds) {
    unsigned long long number_of_event, code, gpu;
    if (set != (nvmlEventSet_t)(uintptr_t)0xe0 || milliseconds) return INVALID;
    number("event", 0, &number_of_event);
    number("event_xid", 0, &code);
    number("event_gpu", 0, &gpu);
    if (number_of_event <= reported) return TIMEOUT;
    reported = number_of_event;
    memset(event, 0, sizeof *event);
    event->device = (nvmlDevice_t)(uintptr_t)(gpu + 1), event->eventType = 8, event->eventData = code;
    return OK;
}
